"""Workloads: sizes of the example GPT, a model as Llama, and random batches of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from examples.gpt import GPT, Config

from .llama import Llama

Model = GPT | Llama


@dataclass(frozen=True)
class Workload:
    """A model, and the number of sequences per rank and step."""

    name: str
    config: Config
    batch: int = 4
    model: type[Model] = GPT


WORKLOADS = (
    Workload("width256x4", Config(width=256, layers=4)),  # matrix products and bytes
    Workload("width64x12", Config(width=64, layers=12)),  # many small ops and messages
    Workload("width512x6", Config(width=512, layers=6)),  # memory
    Workload("width768x12", Config(width=768, layers=12)),  # memory
    Workload("llama256x6", Config(width=256, layers=6), model=Llama),  # much between matrix products
    Workload("tiny16x48", Config(width=16, layers=48, heads=2, context=32)),  # 389 parameters of some 200 elements
)
SMOKE = Workload("smoke", Config(width=16, layers=1, heads=2, context=16))


def build(workload: Workload, device: torch.device) -> Model:
    """The model, with the same weights in every process."""
    torch.manual_seed(0)
    return workload.model(workload.config).to(device)


@dataclass
class RandomBatches:
    """Part ``part`` of ``parts`` of each global batch. Global batches are the same for any number of parts."""

    workload: Workload
    ranks: int
    part: int
    parts: int
    device: torch.device
    different: int = 8  # batches, drawn before the time is measured
    _drawn: list[tuple[Tensor, Tensor]] = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        self._drawn = list(self._draw())

    def _draw(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        config = self.workload.config
        size = (self.workload.batch * self.ranks, config.context + 1)
        for _ in range(self.different):
            rows = torch.randint(config.vocabulary, size, generator=generator).chunk(self.parts)[self.part]
            yield rows[:, :-1].contiguous().to(self.device), rows[:, 1:].contiguous().to(self.device)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The next batch: bytes, and the byte that follows each of them."""
        self._next += 1
        return self._drawn[(self._next - 1) % self.different]
