"""``spmd html FOLDER``: the page of a dump, and what ``Report.save`` writes."""

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
        main(["html", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def data_of(page: Path) -> dict[str, object]:
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    made: dict[str, object] = json.loads(text)
    return made


def test_a_dump_and_a_report_have_one_page(
    step: spmd.CompiledStep, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder) == 0
    (written,) = folder.rglob("report.html")
    assert capsys.readouterr().out == f"wrote {written}\n"
    step.report().save(tmp_path / "report.html")
    assert data_of(tmp_path / "report.html") == data_of(written)
    assert run(folder, "--out", tmp_path / "step.html") == 0
    assert (tmp_path / "step.html").read_text() == written.read_text()


def test_watched_values_are_added(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = tmp_path / "norms.jsonl"
    values.write_text('{"call": 1, "values": {"w": {"norm": 2.0}}}\n')
    assert run(folder, "--watched", values, "--json") == 0
    shown = json.loads(capsys.readouterr().out)["watched"]
    assert shown == [{"statistic": "norm", "calls": [1], "rows": [["w", [2.0]]]}]
    assert run(folder, "--watched", tmp_path / "none") == 2


def test_json_is_what_the_page_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in shown["graph"]["stages"]][::24] == ["00_capture", "24_reuse_memory"]
    assert {span[1] for span in shown["timelines"]["estimated"]["spans"]} == {"compute", "dp"}
    weight = next(each for each in shown["inputs"] if each["name"] == "model.0.weight")
    assert (weight["shape"], weight["split"]) == ([5, 6], [0])


def test_a_report_is_saved_as_plain_data(step: spmd.CompiledStep, tmp_path: Path) -> None:
    report = step.report()
    report.save(tmp_path / "report.json")
    read = Report.from_dict(json.loads((tmp_path / "report.json").read_text()))
    assert read == report
    read.save(tmp_path / "report.html")  # without graphs
    assert "program-0" in (tmp_path / "report.html").read_text()
    with pytest.raises(ValueError, match=r"ends in .html or .json, got .*report.pdf"):
        report.save(tmp_path / "report.pdf")


def test_a_wrong_folder_lists_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder / "other") == 2
    assert f"there is no folder {folder / 'other'}; {folder} has step" in capsys.readouterr().err
