"""``CompiledStep``: a wrapped function with programs, a report and dumps."""

from __future__ import annotations

import inspect
import io
import json
from typing import Any

import pytest
import rich.console
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import passes
import spmd
from tests.harness.structure import compile_on_fake_ranks, regression

pytestmark = pytest.mark.usefixtures("alone")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step of the tests."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_it_looks_like_the_function() -> None:
    for compiled in (spmd.compile(train_step), spmd.compile()(train_step)):
        assert compiled.__name__ == "train_step"
        assert compiled.__doc__ == train_step.__doc__
        assert list(inspect.signature(compiled).parameters) == list(inspect.signature(train_step).parameters)
        assert isinstance(compiled, spmd.CompiledStep)


def test_a_function_given_first_is_compiled_with_the_other_arguments() -> None:
    compiled = spmd.compile(train_step, passes=())
    compiled(*regression(5, 3))
    assert not any("Bucket" in line for line in compiled.program.history)
    with pytest.raises(TypeError, match="parallel_mode"):
        spmd.compile(train_step, parallel_mode=7)


def test_programs_come_with_the_first_call() -> None:
    compiled = spmd.compile(train_step)
    assert (compiled.programs, compiled.program) == ((), None)
    compiled(*regression(5, 3))
    assert len(compiled.programs) == 1
    assert compiled.program is compiled.programs[0]
    assert isinstance(compiled.program, passes.Program)


def test_the_last_train_step_can_be_named_and_flush_called() -> None:
    compiled = spmd.compile(train_step)
    arguments = regression(5, 3)
    expected = F.mse_loss(arguments[0](arguments[2]), arguments[3])
    torch.testing.assert_close(compiled(*arguments, last_train_step=True), expected)
    compiled.flush()


def test_wrong_arguments_of_the_step_are_a_type_error() -> None:
    compiled = spmd.compile(train_step)
    with pytest.raises(TypeError, match="y"):
        compiled(*regression(5, 3)[:3])


def test_results_are_plain_tensors() -> None:
    loss = spmd.compile(train_step)(*regression(5, 3))
    assert type(loss) is Tensor
    assert loss.shape == ()


def test_a_report_counts_times_and_prints() -> None:
    compiled = compile_on_fake_ranks(4, train_step, regression(5, 3)[:2], *regression(5, 3)[2:])
    report = compiled.report()
    as_dict = json.loads(json.dumps(report.to_dict()))
    assert isinstance(as_dict, dict) and as_dict
    assert all(seconds >= 0 for seconds in report.seconds.values()) and "capture" in report.seconds
    assert _printed(report)
    with pytest.raises((ValueError, KeyError), match="all_reduce"):
        report.count("allreduce")


def test_a_report_before_the_first_call_says_what_to_do() -> None:
    with pytest.raises(Exception, match="call"):
        spmd.compile(train_step).report()


def test_a_step_without_modules_runs() -> None:
    @spmd.compile
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))


def _printed(report: Any) -> str:
    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(report)
    return console.file.getvalue()  # type: ignore[attr-defined]
