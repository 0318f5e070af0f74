"""A run of the gate: arms, checkouts, preloading and figures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.gate import __main__ as gate
from benchmarks.gate.arms import ROOT, arm, checkouts
from benchmarks.gate.figures import figures
from benchmarks.gate.preload import Imported, common
from benchmarks.gate.verdicts import LEAST
from tests.harness import programs


def test_an_arm_is_read_from_text() -> None:
    found = arm("A", "--style replicate --mode shard_optimizer=True --compile backend=inductor --clears first")
    assert (found.style, found.clears) == ("replicate", ("first",))
    assert found.mode == {"shard_optimizer": True} and found.compile == {"backend": "inductor"}


@pytest.mark.parametrize(("given", "message"), [
    ([], "what is to be compared?"),
    (["--a", "--clears last"], "the same number of spellings"),
    (["--a", "--mode shard_optimizer"], "expected name=value, got 'shard_optimizer'"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gate.parse(given)
    assert message in capsys.readouterr().err


def test_what_one_arm_imports_early_is_not_imported_before() -> None:
    a, b = Imported(["os", "re"], ["os", "re", "json", "csv"]), Imported(["os", "re"], ["re", "os", "json"])
    assert common(a, b) == ["os", "re", "json"]
    eager = Imported(["os", "re", "json"], ["os", "re", "json"])
    assert common(a, eager) == ["os", "re"]


def worktrees() -> str:
    return subprocess.check_output(["git", "worktree", "list"], cwd=ROOT, text=True)


def test_a_checkout_is_removed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    with checkouts("HEAD") as (base, here):
        assert (base / "spmd/decorator.py").exists() and not (base / "tests").exists()
        assert (here / "spmd/decorator.py").read_text() == (ROOT / "spmd/decorator.py").read_text()
        assert str(base) in worktrees()
    assert str(base) not in worktrees() and not base.exists()
    with pytest.raises(ValueError, match="no-such-commit"), checkouts("no-such-commit"):
        pass


@pytest.mark.processes
@pytest.mark.parametrize("parts", [
    ["step"],
    pytest.param(["warm", "compile", "step", "memory"], marks=pytest.mark.exhaustive),
], ids=["some", "all"])  # fmt: skip
def test_a_run_has_the_figures_that_are_asked_for(parts: list[str], tmp_path: Path) -> None:
    arms = ["--a", "--clears last", "--b", "--clears last --slower 1"]
    least = ["--model", "smoke", "--ranks", "1", "--pairs", "1", "--json", tmp_path / "out"]
    run = programs.run(["-m", "benchmarks.gate", *arms, *least, "--figures", *parts])
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert list(found) == [each.name for each in figures([arm("A", arms[1])] * 2, parts)]
    assert all(name in run.stdout for name in found)
    assert found["step, cleared last: CPU"]["ratio"] > 1.3  # twice, on a quiet machine
    assert {row["answer"] for row in found.values()} == {f"cannot tell (about {LEAST} pairs would tell)"}
