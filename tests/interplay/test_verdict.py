"""A row that differs fails the tests unless it is known, or differs with the packages of the commit before, too."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from . import verdict
from .array import completed, described, plain_row
from .earlier import commit_before, found_before, is_old
from .known import Known, is_known, known, values_of

# In place of the array: the package has what is found in a row, so that each commit has its own.
ARRAY = """
import json, pathlib, sys
import passes, spmd
row, = json.loads(pathlib.Path(sys.argv[sys.argv.index("--rows") + 1]).read_text())
found = spmd.FOUND if row["mesh"] == "3" else []
pathlib.Path(sys.argv[sys.argv.index("--results") + 1]).write_text(json.dumps({"values": row, "found": found}) + "\\n")
"""
ROW = plain_row(mesh="3")
LINE = "rank 0 of 3, step 1: module[0] first.weight: Mismatched elements: 3 / 16, greatest difference 0.25"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose only commit has the difference."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    for package in ("passes", "spmd", "tests", "tests/interplay"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "tests/interplay/__main__.py").write_text(ARRAY)
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path, [LINE])
    return tmp_path


def _git(root: Path, *command: str) -> None:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *who, *command], check=True, capture_output=True)


def _edit(root: Path, found: list[str]) -> None:
    (root / "spmd/__init__.py").write_text(f"FOUND = {found!r}\n")


def _commit(root: Path, found: list[str]) -> None:
    _edit(root, found)
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "--allow-empty", "--message", "A change")


def test_what_the_commit_before_has_too_is_no_fault_of_the_change(checkout: Path) -> None:
    _commit(checkout, [LINE.replace("0.25", "0.251")])
    reason = verdict.excuse(checkout, ROW, [LINE])
    assert reason.startswith("differs on ") and reason.endswith(f", too: mesh=3: {LINE}")
    assert not verdict.excuse(checkout, ROW, [LINE, "rank 0 of 3, step 1: result: expected 1, got 2"])
    assert not verdict.excuse(checkout, plain_row(), [LINE])


def test_what_the_commit_before_lacks_is_a_fault_of_the_change(checkout: Path) -> None:
    _commit(checkout, [])
    _commit(checkout, [LINE])
    assert not verdict.excuse(checkout, ROW, [LINE])


def test_files_that_were_edited_are_compared_with_their_commit(checkout: Path) -> None:
    _commit(checkout, [])
    _edit(checkout, [LINE])
    assert not verdict.excuse(checkout, ROW, [LINE])
    _commit(checkout, [LINE])
    _edit(checkout, [LINE, LINE])
    assert verdict.excuse(checkout, ROW, [LINE])


def test_without_history_a_difference_is_a_fault(checkout: Path, tmp_path: Path) -> None:
    assert commit_before(checkout) is None, "the first commit has none before it"
    _commit(checkout, [LINE])
    exported = checkout / "exported"
    shutil.copytree(checkout / "tests", exported / "tests")
    assert commit_before(exported) is None, "that of a folder around it is of other files"
    _git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{checkout}", str(tmp_path / "shallow"))
    assert commit_before(tmp_path / "shallow") is None
    assert not verdict.excuse(tmp_path / "shallow", ROW, [LINE])


def test_an_array_that_does_not_run_on_the_commit_before_says_nothing_of_it(checkout: Path) -> None:
    (checkout / "passes/__init__.py").write_text("raise ImportError\n")
    _commit(checkout, [LINE])
    _git(checkout, "commit", "--quiet", "--allow-empty", "--message", "Another change")
    commit = commit_before(checkout)
    assert commit is not None and found_before(checkout, commit, ROW) is None
    assert not verdict.excuse(checkout, ROW, [LINE])


def test_errors_are_compared_by_their_last_line() -> None:
    one, other = (f'rank 1 failed first: File "{file}"\nValueError: got {size}' for file, size in (("a", 3), ("b", 4)))
    assert is_old([one], [other, LINE])
    assert not is_old([one], [other.replace("ValueError", "TypeError")])


def test_what_is_known_is_known_by_values_and_sentence() -> None:
    listed = [Known.of("2026-11-30 | mesh=3, model=tied | first.weight: Mismatched | of elements")]
    assert listed == [Known("2026-11-30", {"mesh": "3", "model": "tied"}, "first.weight: Mismatched | of elements")]
    line = "step 1: module[0] first.weight: Mismatched | of elements, 3 of them"
    assert is_known(plain_row(mesh="3", model="tied", cache="warm"), [line], listed)
    assert not is_known(plain_row(mesh="3", model="tied"), [line, LINE], listed)
    assert not is_known(ROW, [line], listed)


def test_a_row_is_read_as_it_is_described() -> None:
    row = plain_row(mesh="3", clears="each second, clipped", between="copy")
    assert plain_row(**values_of(described(row))) == row


def test_each_line_of_the_list_is_a_possible_row() -> None:
    for each in known():
        assert each.sentence and completed(each.values, random.Random(0)) is not None, each
