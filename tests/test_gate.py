"""The gate finds what is slower, calls nothing else slower, and cleans up."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gate import __main__ as gate
from benchmarks.gate.arms import ROOT, arm, checkouts
from benchmarks.gate.figures import figures
from benchmarks.gate.preload import Imported, common
from benchmarks.gate.verdicts import LEAST, judge
from tests.harness import programs


def scattered(pairs: int, scatter: float, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(scale=scatter, size=pairs))


def test_the_three_answers() -> None:
    a, noise = np.ones(60), scattered(60, 0.02)
    assert judge(a, a * noise).answer == "not slower"
    assert judge(a, 1.03 * noise).answer == "slower"
    wide = judge(a, 1.03 * scattered(60, 0.2))
    assert not wide.slower and not wide.not_slower and f"about {wide.needed:,} pairs would tell" in wide.answer


def test_a_slow_machine_in_both_arms_changes_nothing() -> None:
    machine, noise = scattered(60, 0.5, seed=1), scattered(60, 0.02)
    assert judge(machine, machine * noise) == judge(np.ones(60), noise)


def test_pairs_that_are_far_out_count_no_more_than_others() -> None:
    noise = scattered(60, 0.01)
    disturbed = noise.copy()
    disturbed[:4] *= 40
    assert judge(np.ones(60), disturbed).answer == "not slower"


def test_as_many_pairs_as_needed_do_tell() -> None:
    few = judge(np.ones(20), 1.03 * scattered(20, 0.04))
    assert "cannot tell" in few.answer and 20 < few.needed < 200
    assert judge(np.ones(2 * few.needed), 1.03 * scattered(2 * few.needed, 0.04)).slower


def test_too_few_pairs_tell_nothing() -> None:
    verdict = judge(np.ones(LEAST - 1), np.full(LEAST - 1, 2.0))
    assert verdict.answer == f"cannot tell (about {LEAST} pairs would tell)"


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
    found = {row["figure"]: row for row in json.loads((tmp_path / "out").read_text())}
    assert list(found) == [each.name for each in figures([arm("A", arms[1])] * 2, parts)]
    assert all(name in run.stdout for name in found)
    assert found["step, cleared last: CPU"]["ratio"] > 1.3  # twice, on a quiet machine
    assert {row["answer"] for row in found.values()} == {f"cannot tell (about {LEAST} pairs would tell)"}
