"""``spmd inspect FOLDER``: stages and report of a dump."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import spmd
from passes import Report
from spmd.cli.commands import main
from tests.harness.cases import MLP
from tests.harness.structure import compile_on_fake_ranks, regression


@pytest.fixture(scope="module")
def step() -> spmd.CompiledStep:
    """A fully sharded step on two ranks."""
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
        main(["inspect", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_stages_and_report_are_shown(step: spmd.CompiledStep, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert step.program is not None
    names = {each["name"]: each for each in shown["stages"]}
    assert list(names)[:2] == ["00_capture", "01_partition"] and list(names)[-1] == "99_lowered"
    computed = [node for node in step.program.graph.nodes if node.op not in ("placeholder", "output")]
    assert names["99_lowered"]["values"] == len(computed)
    assert all(each["did"] for name, each in names.items() if name[:2] not in ("00", "01", "99"))
    assert run(folder) == 0
    text = capsys.readouterr().out
    assert "09_bucket_all_gather" in text and "gradient: sum over dp" in text and "bytes at the peak" in text


def test_a_report_comes_back_from_plain_data(step: spmd.CompiledStep) -> None:
    report = step.report()
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize("text, why", [("{}", "no report of this version"), ("x", "Expecting value")])
def test_a_report_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    (tmp_path / "00_capture.py").write_text("")
    (tmp_path / "report.json").write_text(text)
    assert run(tmp_path) == 2
    assert why in capsys.readouterr().err
