"""``step.recompiles()``, ``spmd why FOLDER`` and ``report.reason``: each program with the reason that it exists."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import spmd
from spmd.cli.commands import main
from spmd.guards.recompiles import Compilation, Recompiles
from tests.harness.fake import fake_world


@pytest.fixture
def step(tmp_path: Path) -> Iterator[tuple[spmd.CompiledStep, Path]]:
    """A step that was called with another shape, argument and attribute, and again as at first."""
    folder = tmp_path

    @spmd.compile(dump=folder)
    def train(model: torch.nn.Module, x: torch.Tensor, scale: float) -> torch.Tensor:
        loss = F.dropout(model(x), 0.5, model.training).sum() * scale
        loss.backward()
        model.zero_grad()
        return loss

    with fake_world(1):
        model, x = torch.nn.Linear(4, 2), torch.randn(4, 4)
        train(model, x, 1.0)
        train(model, x[:2], 1.0)
        train(model, x[:2], True)
        model.eval()
        train(model, x, 1.0)
        model.train()
        train(model, x, 1.0)
        yield train, folder / "train"


REASONS = [
    "the first call",
    "x: float32[4, 4] on cpu -> float32[2, 4] on cpu",
    "scale: any float -> True",
    "model.training: True -> False",
]


def test_each_program_has_its_reason_and_its_call(step: tuple[spmd.CompiledStep, Path]) -> None:
    found = step[0].recompiles()
    assert [each.reason for each in found] == REASONS
    assert [each.call for each in found] == [1, 2, 3, 4]  # the fifth fits the first program
    assert [each.program for each in found] == [program.name for program in step[0].programs]
    assert all(each.is_kept and each.seconds > 0 for each in found)
    assert json.loads(json.dumps(found.to_dict()))["programs"][1]["reason"] == REASONS[1]
    reports = [json.loads((step[1] / f"program-{k}" / "report.json").read_text()) for k in range(4)]
    assert [each["reason"] for each in reports] == REASONS
    assert spmd.Report.from_dict(reports[1]).reason == REASONS[1]
    assert f"; because of {REASONS[0]}" in " ".join(str(step[0].report()).split())


def test_it_prints_as_a_table() -> None:
    found = Recompiles("train", (Compilation("train/program-0", "x[0]: 1 -> 2", 7, 1.25, is_kept=False),))
    text = io.StringIO()
    Console(file=text, width=100, color_system=None).print(found)
    title, _, row = [line.rstrip() for line in text.getvalue().splitlines()]
    assert title == "train: 1 program" and row.split() == ["train/program-0", "x[0]:", "1", "->", "2", "7", "1.2", "no"]
    assert str(found).splitlines()[0] == title


def test_the_command_lists_the_programs_of_a_step(
    step: tuple[spmd.CompiledStep, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, code in ([str(step[1]), "--json"], 0), ([str(step[1])], 0), ([str(step[1] / "nothing")], 2):
        with pytest.raises(SystemExit) as caught:
            main(["why", *argv])
        assert caught.value.code == code
        if argv[-1] == "--json":
            found = json.loads(capsys.readouterr().out)
            assert [each["reason"] for each in found] == REASONS
            assert [each["program"] for each in found] == [f"train/program-{k}" for k in range(4)]
        elif not code:
            shown = " ".join(capsys.readouterr().out.split())
            assert all(reason in shown for reason in REASONS)
