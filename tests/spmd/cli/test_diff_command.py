"""``spmd diff FOLDER STAGE`` and ``step.diff``: what a pass changed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import passes
import spmd
from spmd.cli.commands import main
from tests.harness.cases import MLP
from tests.harness.fake import fake_world
from tests.harness.structure import regression


@pytest.fixture(scope="module")
def step() -> Iterator[spmd.CompiledStep]:
    """A step on two ranks whose three gradients of weights and biases are reduced together."""
    with fake_world(2):
        compiled = spmd.compile(MLP.step)
        compiled(*regression(6, 5, 4, 3))
        yield compiled


@pytest.fixture(scope="module")
def folder(step: spmd.CompiledStep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dumps")
    step.dump(root)
    return root


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["diff", *map(str, argv)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_pass_is_shown_by_what_it_adds_and_removes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "bucket_all_reduce") == 1
    shown = capsys.readouterr().out
    assert "_bucket_all_reduce.py: " in shown.splitlines()[0]
    gone = [line for line in shown.splitlines() if line.startswith("  - all_reduce")]
    new = [line for line in shown.splitlines() if line.startswith("  + all_reduce")]
    assert len(gone) == 6 and len(new) == 1 and "6 in one" in new[0]


def test_the_step_shows_the_same(step: spmd.CompiledStep, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(folder, "bucket_all_reduce", "--json")
    shown = json.loads(capsys.readouterr().out)
    of_step = step.diff("BucketAllReduce").to_dict()
    assert shown["changes"] == of_step["changes"] and shown["kept"] == of_step["kept"] > 0
    assert step.diff("01", "99").count("added") > 0


def test_a_stage_that_changes_nothing_ends_with_zero(folder: Path) -> None:
    assert run(folder, "partition", "partition") == 0


@pytest.mark.parametrize("wanted, why", [
    (["nothing_such"], "there is no stage 'nothing_such': 00_capture, 01_partition, "),
    (["bucket"], "there are several stages 'bucket': "),
    (["capture"], "00_capture is the first stage"),
    (["01", "02", "03"], "expected one or two stages"),
])  # fmt: skip
def test_a_wrong_stage_lists_what_is_there(
    step: spmd.CompiledStep, folder: Path, capsys: pytest.CaptureFixture[str], wanted: list[str], why: str
) -> None:
    assert run(folder, *wanted) == 2
    assert why in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ValueError) as caught:
        step.diff(*wanted)
    assert why in str(caught.value)


def test_a_wrong_folder_lists_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(folder / "nowhere", "06") == 2
    assert "has step" in capsys.readouterr().err
    assert run(tmp_path, "06") == 2
    assert "has no dump" in capsys.readouterr().err
    for k in range(2):
        (tmp_path / f"program-{k}").mkdir()
        (tmp_path / f"program-{k}" / "00_capture.py").write_text("")
    assert run(tmp_path, "06") == 2
    assert "has several programs; name one: " in capsys.readouterr().err


def test_a_step_that_was_not_called_has_no_stages() -> None:
    with pytest.raises(spmd.SpmdError, match="has not been called yet"):
        spmd.compile(MLP.step).diff("06")


def profiled(path: Path, **options: Any) -> None:
    """Write the report of a step whose calls were measured."""
    step, given = spmd.compile(MLP.step, **options), regression(6, 5, 4, 3)
    step(*given)
    step.profile(2)
    for _ in range(2):
        step(*given)
    step.report().save(path)


@pytest.mark.usefixtures("step")  # for its ranks
def test_two_runs_are_compared(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In time, what is sent, memory, and what passes did; with their reasons."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    profiled(one)
    apart = tuple(each for each in passes.default() if not isinstance(each, passes.BucketAllReduce))
    profiled(other, passes=apart)
    report = json.loads(one.read_text())
    slower = {**report["measured"], "seconds": 2 * report["measured"]["seconds"], "ops": []}
    slower["communication"] += report["measured"]["seconds"]
    capsys.readouterr()
    assert run(other, "--against", one) == 1
    found = capsys.readouterr().out
    counts = re.search(r"all_reduce along dp: (\d+) of .+ in all instead of (\d+) of .+; new: ", found)
    assert counts is not None and int(counts[1]) > int(counts[2])
    assert "bucket_all_reduce: not run instead of " in found
    found = "\n".join(passes.report_changes.changes(report, {**report, "measured": slower}))
    assert ", as measured: " in found and " more of communication that is waited for" in found
    assert "takes" in found and "it runs 0 times instead of" in found
    assert run(one, "--against", one) == 0
    assert "nothing that a report has is other" in capsys.readouterr().out
    assert run(one, "--against", folder) == 1  # which was not measured
    assert "only one of them was measured" in capsys.readouterr().out
    assert run(one) == 2 and run(one, "01", "--against", other) == 2
    other.write_text("{}")
    assert run(one, "--against", other) == 2
