"""The line that says what compiles."""

from __future__ import annotations

import io
import re
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import spmd
import spmd.progress
from tests.harness.fake import fake_world

STAGES = r"capture \d+\.\d s, partition \d+\.\d s, passes \d+\.\d s, lower \d+\.\d s"


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPMD_QUIET")


def train(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def compile_twice(rank: int = 0) -> None:
    """The second call has another shape."""
    with fake_world(2, rank):
        model, step = nn.Linear(3, 4), spmd.compile(train)
        for rows in (2, 2, 5):
            step(model, torch.ones(rows, 3))
            model.zero_grad()


def test_a_log_gets_a_line_for_each_program(capfd: pytest.CaptureFixture[str]) -> None:
    compile_twice()
    first, second = capfd.readouterr().err.splitlines()
    assert re.fullmatch(rf"compiling train \.\.\. {STAGES}", first)
    assert re.fullmatch(rf"compiling train \(program 2: .*x.*\[5, 3\].*\) \.\.\. {STAGES}", second)


def steps_if_training(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = sum((model(x).sum() for x in batch.values()), torch.zeros(()))
    if model.training and optimizer.param_groups[0]["lr"] < 1:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def test_the_reason_is_the_first_difference_to_the_nearest_program(capfd: pytest.CaptureFixture[str]) -> None:
    with fake_world(2):
        model, step, x = nn.Linear(3, 4), spmd.compile(steps_if_training), torch.ones(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, {"x": x})
        with torch.no_grad():
            step(model.eval(), optimizer, {"x": x})
        model.train().bias.requires_grad_(False)  # two more differences to the program that was run last
        step(model, optimizer, {"x": x})
        optimizer.param_groups[0]["lr"] = 2.0
        step(model, optimizer, {"x": x})
        step(model, optimizer, {"x": x, "z": x})
    reasons = [line.partition("(")[2].rpartition(")")[0] for line in capfd.readouterr().err.splitlines()]
    assert reasons[:2] == ["", "program 2: torch's grad mode: (True, False) -> (False, False)"]
    assert reasons[2].startswith("program 3: model.bias: ")
    assert reasons[3:] == [
        "program 4: another branch of the step, for optimizer.0.lr = 2.0",
        "program 5: the structure of the arguments (batch.z is new)",
    ]


def test_other_ranks_write_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    compile_twice(rank=1)
    assert capfd.readouterr().err == ""


def test_spmd_quiet_is_obeyed(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMD_QUIET", "1")
    compile_twice()
    assert capfd.readouterr().err == ""


def test_a_terminal_shows_each_stage_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal: Any = partial(Console, file=screen, force_terminal=True, width=200)
    monkeypatch.setattr(spmd.progress, "Console", lambda **_: terminal())
    compile_twice()
    for running in ("train ... capture", r"capture \d\.\d s, partition", r"passes \d\.\d s, lower"):
        assert re.search(rf"{running}\s", screen.getvalue())
    assert re.search(STAGES, screen.getvalue())


def test_of_a_step_that_fails_the_line_says_how_far_it_came(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("mine")

    with fake_world(2), pytest.raises(KeyError):
        spmd.compile(fails)(nn.Linear(3, 4), torch.ones(2, 3))
    assert capfd.readouterr().err == "compiling fails ... capture\n"


def test_the_report_has_the_nodes_before_and_after_each_pass() -> None:
    with fake_world(2):
        model, step = nn.Linear(3, 4), spmd.compile(train)
        step(model, torch.ones(2, 3))
    report, program = step.report(), step.program
    assert program is not None and report.passes
    counts = [report.passes[0].nodes_before, *(each.nodes_after for each in report.passes)]
    assert [each.nodes_before for each in report.passes] == counts[:-1] and counts[-1] == len(program.graph.nodes)
    passes = [line.partition(": ")[2] for line in program.history[-len(report.passes) :]]
    assert [each.did for each in report.passes] == passes and report.passes[0].stage == "02_drop_profiler"
    assert sum(each.seconds for each in report.passes) <= report.seconds["passes"]
