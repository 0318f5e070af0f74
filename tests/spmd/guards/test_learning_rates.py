"""Learning rates and their like are read at each call: schedulers work and compile nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class Scheduled(MLP):
    """The user's loop moves a scheduler on after each step. ``warm_up`` starts from a learning rate of zero."""

    sizes: tuple[int, ...] = (15, 7)
    rows: int = 6
    warm_up: bool = False

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        factor = (lambda step: step / 4) if self.warm_up else (lambda step: 1 / (1 + step))
        optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return model, optimizer

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].scheduler.step()


@dataclass(frozen=True)
class OtherNumbers(MLP):
    """The user's loop changes momentum, betas and weight decay between steps."""

    sizes: tuple[int, ...] = (15, 7)
    rows: int = 6

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        (group,) = objects[1].param_groups
        group["weight_decay"] = 0.1 / (1 + step)
        if "betas" in group:
            group["betas"] = (0.9 - 0.1 * step, 0.99)
        if group.get("momentum"):
            group["momentum"] = 0.9 - 0.1 * step


@dataclass(frozen=True)
class OneCycle(Scheduled):
    """Momentum, or the first of the betas, falls while the learning rate rises."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = MLP.build(self)
        optimizer.scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8)
        return model, optimizer


@dataclass(frozen=True)
class Plateau(Scheduled):
    """The scheduler gets a growing loss."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = MLP.build(self)
        optimizer.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return model, optimizer

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[1].scheduler.step(float(step))


@dataclass(frozen=True)
class TensorRate(Scheduled):
    """The scheduler writes into a learning rate that is a tensor."""

    def build(self) -> tuple[Any, ...]:
        model, _ = MLP.build(self)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
        optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return model, optimizer


def run(rank: int, world: int, case: MLP, style: str) -> tuple[list[str], int]:
    """What differs, and the number of programs after six steps."""
    mode = spmd.DataParallel(style)
    compiled, got = compiled_run(rank, case, 6, parallel_mode=mode)
    return all_unequal(plain_run(case, world, 6), got, rank, world), len(compiled.programs)


@pytest.mark.parametrize("optimizer, style", [
    ("SGD", "replicate"), ("SGD momentum", "fully_shard"), ("Adam", "replicate"), ("AdamW fused", "fully_shard"),
])  # fmt: skip
def test_a_scheduler_works_and_compiles_nothing(ranks: Ranks, optimizer: str, style: str) -> None:
    assert ranks.run(2, run, Scheduled(optimizer=optimizer), style) == [([], 1)] * 2


@pytest.mark.parametrize(
    "case, style",
    [
        (OneCycle(optimizer="SGD momentum"), "replicate"),
        (OneCycle(optimizer="AdamW"), "fully_shard"),
        (Plateau(optimizer="Adam"), "fully_shard"),
        (TensorRate(), "replicate"),
    ],
    ids=lambda value: type(value).__name__ + value.optimizer if isinstance(value, MLP) else None,
)
def test_so_do_other_schedulers(ranks: Ranks, case: MLP, style: str) -> None:
    assert ranks.run(2, run, case, style) == [([], 1)] * 2


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_learning_rate_may_start_from_zero(ranks: Ranks, optimizer: str) -> None:
    for differ, _ in ranks.run(2, run, Scheduled(optimizer=optimizer, warm_up=True), "replicate"):
        assert differ == []


@dataclass(frozen=True)
class WarmUpOfTable(Scheduled):
    """A table with rows that have no gradient while the learning rate is zero: 0/0 in the form with counters."""

    warm_up: bool = True
    amsgrad: bool = False

    def build(self) -> tuple[Any, ...]:
        table = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 2)).double()
        kind = torch.optim.Adam if self.amsgrad else torch.optim.AdamW
        optimizer = kind(table.parameters(), lr=0.01, weight_decay=0.1, amsgrad=self.amsgrad)
        optimizer.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)
        return table, optimizer

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        rows = torch.randint(3 + step, (4,), generator=random_generator(rank, step))
        return rows, torch.randn(4, 2, generator=random_generator(rank, step), dtype=torch.float64)


@pytest.mark.parametrize("case, style", [
    (WarmUpOfTable(), "replicate"), (WarmUpOfTable(amsgrad=True), "fully_shard"),
])  # fmt: skip
def test_rows_without_gradient_survive_a_learning_rate_of_zero(ranks: Ranks, case: MLP, style: str) -> None:
    assert ranks.run(2, run, case, style) == [([], 1)] * 2


@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW"])
def test_other_numbers_of_a_group_are_live_too(ranks: Ranks, optimizer: str) -> None:
    assert ranks.run(2, run, OtherNumbers(optimizer=optimizer), "replicate") == [([], 1)] * 2
