"""State changed between calls counts, and so do other shapes, other modes and training begun without the compiler."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.oracle import assert_agrees, random_generator
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class Small(MLP):
    sizes: tuple[int, ...] = (15, 7)
    rows: int = 6
    optimizer: str = "SGD momentum"


class BegunWithoutCompiler(Small):
    """Three plain steps on common data come first: the optimizer has state when the compiled step starts."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        for k in range(3):
            self.step(model, optimizer, *self.part(0, 100 + k))
        return model, optimizer


@dataclass(frozen=True)
class ChangedBetweenCalls(Small):
    """The user's loop changes something after most steps, and the last batches are smaller."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(mlp(15, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        rows = 6 if step < 9 else 3
        random = random_generator(rank, step)
        return tuple(torch.randn(rows, size, generator=random, dtype=torch.float64) for size in (15, 4))

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        model, optimizer = objects
        if step == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        if step == 1:
            optimizer.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 3:
            model.load_state_dict(optimizer.saved[0])
            optimizer.load_state_dict(optimizer.saved[1])
        if step == 4:
            model.float().double()
        model.train(step not in (5, 6))  # in evaluation, batch norm's statistics are frozen
        model[0][0].weight.requires_grad_(step < 8)


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_no_call_runs_on_a_stale_graph(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, ChangedBetweenCalls(), style, steps=11)


@pytest.mark.parametrize("style", ["replicate", pytest.param("fully_shard", marks=pytest.mark.exhaustive)])
def test_training_may_have_begun_without_the_compiler(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, BegunWithoutCompiler(), style, steps=5)
