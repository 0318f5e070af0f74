"""Side effects of a step that a graph cannot repeat are refused; no traced tensor is left behind."""

from __future__ import annotations

import array
import csv
import io
import json
import queue
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
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


STREAM = io.StringIO()


def to_a_global(target: Any) -> None:
    STREAM.write("x")


def to_a_bound_method(target: Any) -> None:
    target.write("x")


def rows() -> Any:
    found = SimpleNamespace(file=io.StringIO())
    found.writer = csv.writer(found.file)
    return found


WRITES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    # what makes the target, what writes to it, and what it holds
    "StringIO": (io.StringIO, lambda target: target.write("x"), lambda target: target.getvalue()),
    "json": (io.StringIO, lambda target: json.dump({}, target), lambda target: target.getvalue()),
    "csv": (rows, lambda target: target.writer.writerow([1]), lambda target: target.file.getvalue()),
    "queue": (queue.Queue, lambda target: target.put(1), lambda target: target.qsize()),
    "bytearray": (bytearray, lambda target: target.extend(b"x"), bytes),
    "array": (lambda: array.array("d", [1.0]), lambda target: target.__setitem__(0, 2.0), list),
    "numpy": (lambda: numpy.ones(2), lambda target: target.__iadd__(1.0), list),
    "global": (lambda: STREAM, to_a_global, lambda target: target.getvalue()),
    "method": (lambda: SimpleNamespace(write=STREAM.write), to_a_bound_method, lambda target: STREAM.getvalue()),
    "stdout": (lambda: None, lambda target: sys.stdout.write("x"), lambda target: None),
}


@pytest.mark.parametrize(("make", "write", "content"), WRITES.values(), ids=WRITES)
def test_writes_to_files_and_queues_are_refused_at_their_line(make: Any, write: Any, content: Any) -> None:
    (model, optimizer), target = CASE.build(), make()
    before, streams = content(target), (sys.stdout, sys.stderr)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = CASE.step(model, optimizer, x, y)
        write(target)
        return loss

    with pytest.raises(spmd.CaptureError, match=r"(?s)the step writes to .*test_side_effects\.py:\d+: "):
        spmd.compile(step)(model, optimizer, *CASE.part(0, 0))
    assert content(target) == before and (sys.stdout, sys.stderr) == streams


def test_files_of_the_step_itself_and_prints_to_files_work(capsys: pytest.CaptureFixture[str]) -> None:
    (model, optimizer), target = CASE.build(), io.StringIO()

    @spmd.compile
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = CASE.step(model, optimizer, x, y)
        own = io.StringIO()
        own.write("own")
        target.flush()
        print("line", file=target)
        print("shown", file=sys.stderr)
        warnings.warn(own.getvalue(), stacklevel=1)
        return loss

    with pytest.warns(UserWarning, match="own"):
        step(model, optimizer, *CASE.part(0, 0))
    for k in range(2):
        step(model, optimizer, *CASE.part(0, k))
    assert target.getvalue() == "line\n" * 3
    assert capsys.readouterr().err.count("shown\n") == 3


def test_of_an_array_the_line_that_writes_is_named_and_not_one_that_reads_it_later() -> None:
    target = SimpleNamespace(scratch=numpy.ones(2))

    def step(x: Tensor) -> Tensor:
        target.scratch[0] = 2.0
        return x * float(target.scratch[0])

    with pytest.raises(spmd.CaptureError, match=r": target\.scratch\[0\] = 2\.0"):
        spmd.compile(step)(torch.ones(2))
    assert target.scratch.tolist() == [1.0, 1.0]
