"""Learning rates and their like are read at each call: schedulers work and compile nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class Scheduled(MLP):
    """The user's loop moves a scheduler on after each step. ``warm_up`` starts from a learning rate of zero."""

    sizes: tuple[int, ...] = (15, 17, 4)
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

    sizes: tuple[int, ...] = (15, 17, 4)
    rows: int = 6

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        (group,) = objects[1].param_groups
        group["weight_decay"] = 0.1 / (1 + step)
        if "betas" in group:
            group["betas"] = (0.9 - 0.1 * step, 0.99)
        if group.get("momentum"):
            group["momentum"] = 0.9 - 0.1 * step


def run(rank: int, world: int, case: MLP, style: str) -> tuple[list[str], int]:
    """What differs, and the number of programs after six steps."""
    mode = spmd.DataParallel(style)
    compiled, got = compiled_run(rank, case, 6, parallel_mode=mode)
    return all_unequal(plain_run(case, world, 6), got, rank, world), len(compiled.programs)


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("optimizer, programs", [("SGD", 1), ("SGD momentum", 2), ("Adam", 2), ("AdamW fused", 2)])
def test_a_scheduler_works_and_compiles_nothing(ranks: Ranks, optimizer: str, programs: int, style: str) -> None:
    assert ranks.run(2, run, Scheduled(optimizer=optimizer), style) == [([], programs)] * 2


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_learning_rate_may_start_from_zero(ranks: Ranks, optimizer: str) -> None:
    for differ, _ in ranks.run(2, run, Scheduled(optimizer=optimizer, warm_up=True), "replicate"):
        assert differ == []


@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW"])
def test_other_numbers_of_a_group_are_live_too(ranks: Ranks, optimizer: str) -> None:
    assert ranks.run(2, run, OtherNumbers(optimizer=optimizer), "replicate") == [([], 2)] * 2
