"""Cases for the oracle: two MLPs and several optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .oracle import Case, random_generator

if TYPE_CHECKING:
    import pytest

STYLES = ("replicate", "fully_shard", "default")
STYLES_ON_RANKS = (("replicate", 2), ("fully_shard", 3))  # hardly any size divides by three
# "replicate" is the same on more ranks, and a third one costs as much as each of two: parts for three are uneven in
# other places, whatever a step computes. Tests of losses and of modules have them in each run, others if exhaustive.
ON_THREE = ("fully_shard", 3)
STYLES_IN_TURN = (("fully_shard", 2), *(("replicate", 2), ("fully_shard", 2)) * 2)
THREE_IN_TURN = (("fully_shard", 2), ("replicate", 2), ("shard_optimizer", 2))

_KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
_IMPLEMENTATIONS: dict[str, dict[str, bool]] = {"": {}, " foreach": {"foreach": True}, " fused": {"fused": True}}

KINDS = tuple(_KINDS)
IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    kind + implementation: (optimizer, options | extra)
    for kind, (optimizer, options) in _KINDS.items()
    for implementation, extra in _IMPLEMENTATIONS.items()
}


def in_turn(
    request: pytest.FixtureRequest,
    which: int,
    styles: Sequence[tuple[str, int]] = STYLES_IN_TURN,
    more: Sequence[tuple[str, int]] = (ON_THREE,),
) -> Sequence[tuple[str, int]]:
    """The styles and worlds for the test that is number ``which`` of its kind: one of them, or all if exhaustive.

    ``more``: those that are for exhaustive runs alone.
    """
    if request.config.getoption("--exhaustive"):
        return list(dict.fromkeys([*more, *styles]))
    return [styles[which % len(styles)]]


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers of these widths with tanh between them, in fp64."""
    layers = [layer for width, height in pairwise(sizes) for layer in (nn.Linear(width, height), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A step of regression that clips by the norm of all gradients."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """One of ``OPTIMIZERS`` for these parameters or groups."""
    kind, options = OPTIMIZERS[name]
    return kind(parameters, **options)


@dataclass(frozen=True)
class MLP(Case):
    """Regression with a mean loss."""

    sizes: tuple[int, ...] = (50, 32, 8)
    rows: int = 128
    optimizer: str = "SGD"
    device: str = "cpu"

    def build(self) -> tuple[Any, ...]:
        """The model and its optimizer."""
        model = mlp(*self.sizes).to(self.device)
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...] | dict[str, Any]:
        """``x`` and ``y``: (rows, first size), (rows, last size)."""
        random = random_generator(rank, step)
        return tuple(
            torch.randn(self.rows, size, generator=random, dtype=torch.float64).to(self.device)
            for size in (self.sizes[0], self.sizes[-1])
        )

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update."""
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Block(nn.Module):
    """Two Linears, so that a list of these is one of repeated blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


WIDE = MLP()
NARROW = MLP(sizes=(15, 17, 1), rows=5)  # nothing divides by the ranks, and some parameters have fewer rows
