"""Ranks that trace the same graph in different orders run the same program, with the numbers of the plain step.

A ``set`` of strings is iterated over in an order that each process chooses: here rank 1 goes the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import passes
import spmd
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

NAMES = ("near", "far")


def unordered() -> tuple[str, ...]:
    """The names, as a set of them might be iterated over on this rank."""
    return NAMES[:: -1 if dist.is_initialized() and dist.get_rank() % 2 else 1]


class Branches(nn.Module):
    """Tables and constants of each branch, then a shared layer and one of each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.layers = nn.ModuleDict({name: nn.Linear(6, 4) for name in NAMES})
        for k, name in enumerate(NAMES):
            self.register_buffer(name, torch.linspace(k, 1, 6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tables = {
            name: (getattr(self, name) * torch.tensor([1.0, 2, 3, 4, 5, len(name)])).cos() for name in unordered()
        }
        hidden = self.shared(x).tanh()
        return {name: self.layers[name](hidden * tables[name]) for name in unordered()}


@dataclass(frozen=True)
class Unordered(Case):
    """Two losses of two branches; results come in the order of this rank, too."""

    momentum: float = 0.9

    def build(self) -> tuple[Any, ...]:
        model = Branches().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(4, size, generator=random, dtype=torch.float64) for size in (6, 4))

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        losses = {name: (out - y).square().mean() for name, out in model(x).items()}
        torch.stack([losses[name] for name in NAMES]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses


@pytest.mark.parametrize("style, world", [
    ("fully_shard", 2), pytest.param("replicate", 2, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_numbers_are_those_of_the_plain_step(ranks: Ranks, style: str, world: int) -> None:
    assert_agrees(ranks, world, Unordered(), style)


def texts(rank: int, world: int) -> list[str]:
    """The programs with and without optimizer state, as captured and as partitioned."""
    case = Unordered()
    step, objects = spmd.compile(case.step), case.build()
    for k in range(2):
        step(*objects, *case.part(rank, k))
    compiled = step._dispatch.programs.all
    return [passes.print_program(program) for each in compiled for program in (each.captured.program, each.partitioned)]


def test_texts_are_equal_from_capture_on(ranks: Ranks) -> None:
    first, second = ranks.run(2, texts)
    assert first == second


def noise(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Draws in the order of this rank, of one shape: nothing but their readers tells them apart."""
    drawn = {name: torch.randn(3) for name in unordered()}
    return {name: drawn[name] * scale + 0 * x.sum() for name, scale in zip(NAMES, (1.0, 2.0), strict=True)}


def drawn(rank: int, world: int, seeds: dict[str, Any]) -> dict[str, list[float]]:
    spmd.seed(**seeds)
    return {name: each.tolist() for name, each in spmd.compile(noise)(nn.Linear(2, 2), torch.ones(2, 2)).items()}


@pytest.mark.parametrize("invariant", [False, True])
def test_draws_are_numbered_in_the_order_of_rank_0(ranks: Ranks, invariant: bool, alone: None) -> None:
    first, second = ranks.run(2, drawn, {"seed": 3, "invariant": invariant})
    assert first == second
    if invariant:
        assert drawn(0, 1, {"seed": 3, "invariant": True}) == first


def recomputed(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    def layer(name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(model(x), 0.5).tanh()

    outs = {name: torch.utils.checkpoint.checkpoint(layer, name, x, use_reentrant=False) for name in unordered()}
    (outs["near"].sum() + outs["far"].square().sum()).backward()
    return {name: outs[name].detach() for name in unordered()} | {"grad": model.weight.grad}


def with_dropout(rank: int, world: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Linear(4, 4).double()
    results = spmd.compile(recomputed)(model, torch.ones(2, 4, dtype=torch.float64))
    return {name: results[name] for name in ("grad", *NAMES)}


def test_checkpointed_draws_repeat_themselves(ranks: Ranks) -> None:
    """The gradient of a dropout that drew other numbers in backward would be another one."""
    first, second = ranks.run(2, with_dropout)
    assert torch.equal(first["grad"], second["grad"])
    for found in (first, second):
        assert set(found) == {"grad", *NAMES}


def three(rank: int, world: int) -> None:
    """A sum of three in another order is rounded differently: another program."""

    def step(x: Tensor) -> Tensor:
        order = (1.0, 2.0, 3.0) if rank == 0 else (3.0, 2.0, 1.0)
        total = x * 0
        for scale in order:
            total = total + (x * scale).exp()
        return total.sum()

    with pytest.raises(spmd.RankMismatchError):
        spmd.compile(step)(torch.ones(4))


def test_sums_in_other_orders_are_other_programs(ranks: Ranks) -> None:
    ranks.run(2, three, timeout=50)  # under a minute, each rank captures for itself
