"""Models that a step copies and optimizers that it makes: they end with the call, as in inner loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, THREE_IN_TURN, in_turn
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks

Make = Callable[[Any], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01),  # it has state before it steps
}


def descend(model: nn.Module, make: Make, x: Tensor, y: Tensor) -> Tensor:
    """Two steps of an optimizer that begins anew."""
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def move_to(model: nn.Module, other: nn.Module) -> None:
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        own.add_(theirs - own, alpha=0.5)


@dataclass(frozen=True)
class Inner(MLP):
    """``copies``: the inner loop trains a copy, to which the model moves, as in Reptile; else the model itself."""

    sizes: tuple[int, ...] = (5, 7, 4)
    rows: int = 6
    make: str = "SGD"
    copies: bool = True

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return *super().part(rank, step), MAKE[self.make], self.copies

    def whole(self, parts: list[Any]) -> Any:
        x, y, make, copies = zip(*parts, strict=True)
        return torch.cat(x), torch.cat(y), make[0], copies[0]

    @staticmethod
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor, make: Make, copies: bool) -> Any:  # type: ignore[override]
        learner = copy.deepcopy(model) if copies else model
        inner = descend(learner, make, x, y)
        if copies:
            move_to(model, learner)
        outer = F.mse_loss(model(x), y)
        outer.backward()
        optimizer.step()
        optimizer.zero_grad()
        return inner, outer.detach()


CASES = [Inner(make="SGD"), Inner(make="AdamW"), Inner(make="Adagrad"), Inner(make="AdamW", copies=False)]
IN_TURN = (*THREE_IN_TURN, ("fully_shard", 2))


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.exhaustive) if c.make == "Adagrad" else c for c in CASES], ids=str
)
def test_inner_loops_are_those_of_the_plain_step(ranks: Ranks, case: Inner, request: pytest.FixtureRequest) -> None:
    for style, world in in_turn(request, CASES.index(case), IN_TURN):
        assert_agrees(ranks, world, case, style, steps=3)


class Keeper:
    """A trainer that keeps what its step makes, as an attribute."""

    def __init__(self, made: Callable[[nn.Module, Tensor], Any]) -> None:
        self.model, self.made, self.kept = nn.Linear(3, 3), made, None

    def step(self, x: Tensor) -> Any:
        loss = self.model(x).square().mean()
        self.kept = self.made(self.model, loss)
        return loss


class Meter:
    def __init__(self, value: float) -> None:
        self.value = value


KEPT: list[tuple[Callable[[nn.Module, Tensor], Any], str]] = [
    (lambda model, loss: copy.deepcopy(model), r"keeps in .*kept a Linear that it has made, .*load_state_dict"),
    (lambda model, loss: torch.optim.SGD(model.parameters(), lr=0.1), "puts a SGD that holds tensors in .*kept"),
    (lambda model, loss: Meter(loss.item()), "puts a Meter that holds tensors in .*numbers themselves"),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("made, message", KEPT)
def test_what_ends_with_a_call_cannot_be_kept(made: Any, message: str) -> None:
    keeper = Keeper(made)
    with pytest.raises(spmd.CaptureError, match=message):
        spmd.compile(keeper.step)(torch.ones(2, 3))
    assert keeper.kept is None
