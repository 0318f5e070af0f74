"""Side effects of a step that a graph cannot repeat are refused; no traced tensor is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import MLP

CASE = MLP(sizes=(15, 17, 4), rows=6)
pytestmark = pytest.mark.usefixtures("alone")


def test_a_scheduler_inside_of_the_step_is_refused_with_its_line() -> None:
    model, optimizer = CASE.build()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = CASE.step(model, optimizer, x, y)
        schedule.step()
        return loss

    before = dict(optimizer.param_groups[0])
    words = r"(?s)calls a scheduler \(StepLR\).*outside of the step.*: schedule\.step\(\)"
    with pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(step)(model, optimizer, *CASE.part(0, 0))
    assert optimizer.param_groups[0] == before and schedule.last_epoch == 0
    schedule.step()
    assert schedule.last_epoch == 1


def test_a_flag_of_a_group_that_the_step_changes_is_refused() -> None:
    model, optimizer = CASE.build()

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = CASE.step(model, optimizer, x, y)
        optimizer.param_groups[0]["nesterov"] = "maybe"
        return loss

    before = dict(optimizer.param_groups[0])
    with pytest.raises(spmd.CaptureError, match=r"optimizer\.0\.nesterov.*outside"):
        spmd.compile(step)(model, optimizer, *CASE.part(0, 0))
    assert optimizer.param_groups[0] == before


class Remembers(nn.Module):
    """Keeps its last output, a list of them, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 4).double()
        self.last: Tensor | None = None
        self.all: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.linear(x)
        self.all.append(self.last)
        return self.all[0]


def test_a_list_that_is_read_while_it_grows_is_refused_and_nothing_is_changed() -> None:
    model = Remembers()
    words = r"appends to model\.all at test_side_effects\.py:\d+: self\.all\.append.*return self\.all\[0\].*outside"
    with pytest.raises(spmd.CaptureError, match=words):
        spmd.compile(CASE.step)(model, torch.optim.SGD(model.parameters()), *CASE.part(0, 0))
    assert model.last is None and model.all == [] and model.calls == 0


def test_state_that_is_also_an_argument_is_one_input() -> None:
    def step(model: nn.Module, optimizer: Any, parameters: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ends = []
    for train in (step, spmd.compile(step)):
        torch.manual_seed(0)
        model, optimizer = CASE.build()
        for k in range(3):
            train(model, optimizer, list(model.parameters()), *CASE.part(0, k))
        ends.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-10)


def test_arguments_that_share_memory_which_the_step_writes_are_refused() -> None:
    def step(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b.sum()

    x = torch.zeros(4, 4)
    with pytest.raises(spmd.CaptureError, match="a and b share memory"):
        spmd.compile(step)(x, x)
    assert not x.any()


def test_the_gradient_of_an_argument_is_refused_with_an_alternative() -> None:
    model, optimizer = CASE.build()
    x, y = CASE.part(0, 0)
    with pytest.raises(spmd.CaptureError, match=r"argument x .*torch\.autograd\.grad"):
        spmd.compile(CASE.step)(model, optimizer, x.requires_grad_(), y)


def test_a_method_can_be_compiled() -> None:
    class Trainer:
        @spmd.compile
        def double(self, x: Tensor) -> Tensor:
            return x * 2

    assert torch.equal(Trainer().double(torch.ones(3)), torch.full((3,), 2.0))
