"""``spmd why FOLDER NAME`` and ``report.caused_by``: the collectives of a parameter or module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import spmd
from spmd.cli.commands import main
from tests.harness.cases import MLP
from tests.harness.structure import compile_on_fake_ranks, regression


@pytest.fixture(scope="module")
def step() -> spmd.CompiledStep:
    """A fully sharded step on two ranks, of two linear layers."""
    model, optimizer, x, y = regression(6, 5, 4)
    mode = spmd.DataParallel("fully_shard")
    compiled: spmd.CompiledStep = compile_on_fake_ranks(2, MLP.step, (model, optimizer), x, y, parallel_mode=mode)
    return compiled


@pytest.fixture(scope="module")
def folder(step: spmd.CompiledStep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dumps")
    step.dump(root)
    return root


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["why", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("name, kinds", [
    ("model.0", ["all_gather", "reduce_scatter"]),
    ("model.0.weight", ["all_gather", "reduce_scatter"]),
    ("model", ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]),
    ("result.0", ["all_reduce"]),
])  # fmt: skip
def test_the_collectives_of_a_name(
    step: spmd.CompiledStep, folder: Path, capsys: pytest.CaptureFixture[str], name: str, kinds: list[str]
) -> None:
    assert run(folder, name, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in shown] == [each.kind for each in step.report().caused_by(name)] == kinds
    assert {each["node"] for each in shown} <= {node.name for node in step.program.graph.nodes}
    assert run(folder, name) == 0
    assert all(f"\n{kind} " in capsys.readouterr().out for kind in kinds[:1])


def test_a_name_is_no_beginning_of_another(step: spmd.CompiledStep) -> None:
    assert step.report().caused_by("model.0.w") == step.report().caused_by("") == ()


def test_what_communicates_nothing_and_what_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "x") == 1
    assert "x causes no communication" in capsys.readouterr().out
    assert run(folder, "model.7.weight") == 2
    assert "model.0.weight, model.2.weight" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"bits": "same"}], ids=str)
def test_the_runs_of_a_program_have_its_report(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a folder of its own, beside that of the program."""
    model, optimizer, x, y = regression(6, 5, 4, rows=8)
    mode = spmd.DataParallel("fully_shard", **options)
    step = compile_on_fake_ranks(2, MLP.step, (model, optimizer), x, y, parallel_mode=mode, dump=tmp_path)
    assert run(tmp_path, "model.0.weight", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in shown] == [each.kind for each in step.report().caused_by("model.0.weight")]
    first, *others = sorted(path for path in (tmp_path / "step").iterdir() if path.is_dir())
    assert first.name == "program-0" and others
    assert run(others[0], "model.0.weight") == 2
    assert f"is a run of the program in {first}, which has the report of all" in capsys.readouterr().err


def test_a_report_of_something_else_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "00_capture.py").write_text("")
    (tmp_path / "report.json").write_text("{}")
    assert run(tmp_path, "x") == 2
    assert "report.json cannot be read: it is no report of this version" in capsys.readouterr().err
