"""State changed between calls counts, and so do other shapes, other modes and training begun without the compiler."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class Small(MLP):
    sizes: tuple[int, ...] = (15, 17, 4)
    rows: int = 6
    optimizer: str = "SGD momentum"


class BegunWithoutCompiler(Small):
    """Three plain steps on common data come first: the optimizer has state when the compiled step starts."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        for k in range(3):
            self.step(model, optimizer, *self.part(0, 100 + k))
        return model, optimizer


class OtherParameters(Small):
    """The user's loop scales parameters in place."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        with torch.no_grad():
            for parameter in objects[0].parameters():
                parameter.mul_(0.9)


class LoadedStates(Small):
    """After the third step the user's loop loads what it saved after the first."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        model, optimizer = objects
        if step == 1:
            optimizer.saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 3:
            model.load_state_dict(optimizer.saved[0])
            optimizer.load_state_dict(optimizer.saved[1])


class SmallerLastBatch(Small):
    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        rows = 6 if step < 4 else 3
        random = random_generator(rank, step)
        return tuple(torch.randn(rows, size, generator=random, dtype=torch.float64) for size in (15, 4))


class EvalInBetween(Small):
    """Batch norm's statistics are frozen for two steps."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(mlp(15, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[0].train(step not in (1, 2))


class FrozenLater(Small):
    """A parameter is frozen after two steps."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        objects[0][0].weight.requires_grad_(step < 1)


class Converted(Small):
    """The model goes to another dtype and back."""

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        if step in (1, 3):
            objects[0].float().double()


CASES = [
    BegunWithoutCompiler(),
    OtherParameters(),
    LoadedStates(),
    SmallerLastBatch(),
    EvalInBetween(),
    FrozenLater(),
    Converted(),
]


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_no_call_runs_on_a_stale_graph(ranks: Ranks, case: Case, style: str) -> None:
    assert_agrees(ranks, 2, case, style, steps=6)
