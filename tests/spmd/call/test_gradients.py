"""``param.grad`` after a step is what the plain step leaves, and gradients from before a step count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.cases import MLP
from tests.harness.oracle import Case, assert_agrees
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


CASES = [ZeroedFirst(), SetToZero(), NeverZeroed(), ThereBefore(), TensorHook(), HookAfterAccumulation()]


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_gradients_are_those_of_the_plain_step(ranks: Ranks, case: Case, style: str) -> None:
    assert_agrees(ranks, 2, case, style)
