"""``param.grad`` after a step is what the plain step leaves, and gradients from before a step count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import Case, assert_agrees, compiled_run
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class Small(MLP):
    sizes: tuple[int, ...] = (15, 17, 4)
    rows: int = 6


class ZeroedFirst(Small):
    """Gradients stay after the step, for the user to look at."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


class SetToZero(Small):
    """``set_to_none=False`` keeps gradients of zeros."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss


class NeverZeroed(Small):
    """Each step adds to the gradients of all steps before."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


class ThereBefore(Small):
    """A plain backward pass before the first compiled step left gradients."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        model(torch.ones(3, self.sizes[0], dtype=torch.float64)).square().mean().backward()
        return model, optimizer


class TensorHook(Small):
    """A hook on a parameter changes its gradient."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        model[0].weight.register_hook(lambda gradient: gradient * 3)
        return model, optimizer


def halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class HookAfterAccumulation(Small):
    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        model[0].bias.register_post_accumulate_grad_hook(halved)
        return model, optimizer


class UpdatedFirst(Small):
    """Each step begins with the update by the gradients of the one before, and has read them when it clears them."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.step()
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss


class ClearedEveryOther(Small):
    """Every other step adds to the gradients of the one before; the fourth has fewer rows."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        model.begins = True
        return model, optimizer

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)
        return (x, y) if step < 3 else (x[:4], y[:4])

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        if model.begins:
            optimizer.zero_grad()
        model.begins = not model.begins
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss


CASES = [
    UpdatedFirst(),
    ClearedEveryOther(),
    SetToZero(),
    NeverZeroed(),
    ThereBefore(),
    TensorHook(),
    HookAfterAccumulation(),
]  # those of ZeroedFirst, in each mode, are in test_held_gradients.py


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
@pytest.mark.in_turn("style")
def test_gradients_are_those_of_the_plain_step(ranks: Ranks, case: Case, style: str) -> None:
    assert_agrees(ranks, 2, case, style, steps=5)


@dataclass(frozen=True)
class ClearedByHand(Small):
    """Clears gradients one by one, before any has come; the last layer is not used, and has none."""

    def build(self) -> tuple[Any, ...]:
        model, optimizer = super().build()
        model.unused = nn.Linear(2, 2).double()
        optimizer.add_param_group({"params": list(model.unused.parameters())})
        return model, optimizer

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = F.mse_loss(nn.Sequential.forward(model[:-1], x), y)
        loss.backward()
        optimizer.step()
        return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", [ZeroedFirst(), ClearedByHand()], ids=lambda case: type(case).__name__)
def test_gradients_that_are_cleared_first_make_no_second_program(case: Case) -> None:
    step, _ = compiled_run(0, case, 3)
    assert len(step.programs) == 1


@pytest.mark.usefixtures("alone")
def test_a_gradient_that_comes_from_elsewhere_is_cleared_too() -> None:
    case = ClearedByHand()
    torch.manual_seed(0)
    plain, (model, optimizer) = case.build(), case.build()
    step = spmd.compile(case.step)
    for k in range(3):
        for objects in (plain, (model, optimizer)):
            objects[0].unused.weight.grad = torch.ones(2, 2, dtype=torch.float64) if k == 1 else None
        case.step(*plain, *case.part(0, k))
        step(model, optimizer, *case.part(0, k))
        assert model.unused.weight.grad is None and model[0].weight.grad is not None
    assert len(step.programs) == 1
