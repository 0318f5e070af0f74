"""``spmd fuzz``: steps run clean, the same for a seed; a planted bug is found, and shrunk to a file that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import fx

import passes
from passes import Kind, Program
from passes.ir.collectives import is_wait, kind_of, operands
from spmd.cli import fuzz_command
from spmd.cli.commands import main
from spmd.fuzzing import search
from spmd.fuzzing.outcome import Outcome
from spmd.fuzzing.search import Findings, fuzz
from tests.harness import programs


@pytest.mark.slow
@pytest.mark.timeout(900)  # with --exhaustive
def test_random_steps_run_clean(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    count = 100 if request.config.getoption("--exhaustive") else 5
    findings = fuzz(count, 0, tmp_path)
    assert not findings.failures, findings.failures[0].outcome.details
    assert findings.count == count and findings.agreed >= 0.8 * count, findings.refusals


def planted(program: Program) -> int:
    """A pass that is wrong where a program multiplies matrices: one gradient is not reduced."""
    wanted = [node for node in program.graph.nodes if "mm" in str(node.target)]
    sums = [node for node in program.collectives() if kind_of(node) is Kind.ALL_REDUCE and of_gradient(node)]
    for node in sums[:1] if wanted else ():
        wait = next(user for user in node.users if is_wait(user))
        wait.replace_all_uses_with(operands(node)[0])
        return 1
    return 0


def of_gradient(node: fx.Node) -> bool:
    return bool(node.meta["collective"].role is passes.Role.GRADIENT)


@pytest.mark.slow
def test_a_planted_bug_is_found_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes.DropDetach, "rewrite", lambda self, program: planted(program))
    findings = fuzz(3, 0, tmp_path, attempts=5)
    (failure,) = findings.failures
    assert failure.outcome.reason == "wrong values after DropDetach", failure.outcome.details
    text = failure.path.read_text()
    assert len([line for line in text.splitlines() if line]) <= 24, text
    monkeypatch.undo()
    alone = programs.run([failure.path])
    assert alone.returncode == 0, alone.stderr  # nothing is planted there
    assert "train_step agrees" in alone.stdout


def texts(monkeypatch: pytest.MonkeyPatch, seed: int, folder: Path) -> list[str]:
    found: list[str] = []

    def read(path: Path) -> Outcome:
        found.append(path.read_text())
        return Outcome("agreed")

    monkeypatch.setattr(search, "run", read)
    assert fuzz(6, seed, folder).agreed == 6
    return found


@pytest.mark.slow
def test_a_seed_stands_for_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = texts(monkeypatch, 3, tmp_path)
    assert first == texts(monkeypatch, 3, tmp_path) and first != texts(monkeypatch, 4, tmp_path)
    assert len(set(first)) > 4


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["fuzz", *argv])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def ending(*outcomes: Outcome) -> Any:
    """Verify no step, and let these be the outcomes."""
    left = list(outcomes)
    return lambda path: left.pop(0) if left else Outcome("agreed")


def test_the_command_ends_with_zero_where_all_agree_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "run", ending(Outcome("agreed"), Outcome("refused", "it draws")))
    assert run("--count", "5", "--out", str(tmp_path / "found")) == 0
    assert "refused 1: it draws" in (shown := capsys.readouterr().out)
    assert "5 steps with seed 0: 4 agreed, 1 refused, 0 failed" in shown
    assert not (tmp_path / "found").exists()


def test_the_command_ends_with_one_where_a_step_fails_and_writes_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "run", ending(Outcome("agreed"), Outcome("failed", "wrong values", "all of them")))
    assert run("--count", "3", "--seed", "2", "--out", str(tmp_path), "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (failure,) = found["failures"]
    assert (found["count"], found["failed"], failure["reason"]) == (3, 1, "wrong values")
    assert Path(failure["file"]).read_text().endswith("assert verdict\n")


def test_what_is_missing_or_wrong_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--count", "0") == 2
    assert "--count to be 1 or more" in capsys.readouterr().err
    monkeypatch.setattr(fuzz_command, "find_spec", lambda name: None)
    assert run("--count", "1") == 2
    assert 'pip install "spmd[fuzz]"' in capsys.readouterr().err


def test_failures_are_counted_once_for_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "run", lambda path: Outcome("failed", "always"))
    findings: Findings = fuzz(4, 0, tmp_path, attempts=3)
    assert (len(findings.failures), findings.again, findings.count) == (1, 3, 4)


def test_an_interrupt_leaves_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> Outcome:
        if len(found) == 3:
            raise KeyboardInterrupt
        found.append(path)
        return Outcome("agreed")

    found: list[Path] = []
    monkeypatch.setattr(search, "run", read)
    assert fuzz(9, 0, tmp_path).agreed == 3
