"""``CompiledStep``: a wrapped function with programs, a report and dumps."""

from __future__ import annotations

import html
import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path
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


def test_it_shows_its_mode_and_programs_and_in_a_notebook_its_report() -> None:
    compiled = spmd.compile(train_step, parallel_mode="fully_shard")
    assert repr(compiled) == "<compiled step train_step, DataParallel('fully_shard'), programs: none yet>"
    assert compiled._repr_html_() == f"<p><code>{html.escape(repr(compiled))}</code></p>"
    compiled(*regression(5, 3))
    assert repr(compiled).endswith("programs: 1 in use, last train_step/program-0>")
    assert compiled.report()._repr_html_() in compiled._repr_html_()


TYPED = """
import torch
import spmd

@spmd.compile
def bare(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError

@spmd.compile(parallel_mode="fsdp", memory="600MB")
def given(x: torch.Tensor, k: int = 1) -> tuple[torch.Tensor, int]:
    raise NotImplementedError

class Trainer:
    @spmd.compile(parallel_mode=spmd.DataParallel())
    def step(self, x: torch.Tensor) -> float:
        raise NotImplementedError

reveal_type(bare)
reveal_type(given(torch.ones(1), k=3))
reveal_type(given(torch.ones(1), last_train_step=True))
reveal_type(Trainer().step(torch.ones(1)))
reveal_type(Trainer().step.report().count("all_reduce"))
given("a")
spmd.compile(memry=3)
"""


@pytest.mark.exhaustive  # half a minute
def test_type_checkers_know_what_a_step_takes_and_returns(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "typed.py")], capture_output=True, text=True
    )
    shown = re.sub(r"[\w./]*typed.py:\d+: |torch\._tensor\.|torch\.nn\.modules\.module\.", "", done.stdout)
    revealed = re.findall(r'Revealed type is "(.*)"', shown)
    assert revealed == [
        "spmd.step.CompiledStep[[model: Module, x: Tensor], Tensor]",
        "tuple[Tensor, int]",
        "tuple[Tensor, int]",
        "float",
        "int",
    ]
    assert re.findall(r"error: (.*?)  \[", shown) == [
        'No overload variant of "__call__" of "CompiledStep" matches argument type "str"',
        'Unexpected keyword argument "memry" for overloaded function "compile"; did you mean "memory"?',
    ]


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
