"""Backends that take regions: torch's, and one of one's own. All that goes around regions stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import spmd
from passes.ir.effects import is_functional
from passes.ir.region import regions
from tests.harness.cases import MLP, make_optimizer
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

Backend = Callable[..., Any]


@dataclass(frozen=True)
class Normed(MLP):
    """A norm and a GELU between two layers, clipped; the rate changes in each step, and the fourth batch is short."""

    sizes: tuple[int, ...] = (6, 8, 3)
    rows: int = 5

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return tuple(x[: 3 if step == 3 else None] for x in super().part(rank, step))

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].param_groups[0]["lr"] *= 0.5

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Counting:
    """Runs a region op by op, and counts the modules that it was given and the calls of them."""

    def __init__(self) -> None:
        self.modules: list[fx.GraphModule] = []
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Tensor]) -> Backend:
        vals = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        assert all(x is val for x, val in zip(example_inputs, vals, strict=True))
        assert all(is_functional(node) for node in gm.graph.nodes if node.op not in ("placeholder", "output"))
        self.modules.append(gm)

        def run(*operands: Tensor) -> Any:
            self.calls += 1
            return gm(*operands)

        return run


def eager(**options: Any) -> Backend:
    return partial(torch.compile, backend="eager", fullgraph=True, **options)


def aot_eager(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Backend:
    return torch.compile(gm, backend="aot_eager", fullgraph=True)  # type: ignore[no-any-return]


BACKENDS: dict[str, Callable[[], Backend]] = {"mine": Counting, "eager": eager, "aot_eager": lambda: aot_eager}


def trained(rank: int, world: int, case: MLP, name: str, mode: dict[str, Any]) -> list[str]:
    """What differs from the plain step after each of five calls."""
    backend = BACKENDS[name]()
    parallel_mode = spmd.DataParallel(**mode)
    compiled, got = compiled_run(rank, case, 5, parallel_mode=parallel_mode, backend=backend)
    assert len(compiled.programs) >= 2
    for program in compiled.programs:
        assert len(regions(program.graph)) >= 2 and program.collectives()
    if isinstance(backend, Counting):
        assert backend.calls >= 5 * 2 > len(backend.modules) / 2
    return all_unequal(plain_run(case, world, 5), got, rank, world)


@pytest.mark.parametrize(
    "name, optimizer, style",
    [
        ("mine", "AdamW", "fully_shard"),
        ("mine", "SGD momentum", "default"),
        ("eager", "SGD", "fully_shard"),
        ("aot_eager", "AdamW", "replicate"),
    ],
)
def test_the_numbers_are_those_of_the_plain_step(ranks: Ranks, name: str, optimizer: str, style: str) -> None:
    mode = {"parallel_style": style}
    assert ranks.run(2, trained, Normed(optimizer=optimizer), name, mode) == [[]] * 2
