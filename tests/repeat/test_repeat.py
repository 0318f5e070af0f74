"""The runner of repeated tests finds the one that depends on its order, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import __main__ as repeat

TOY = """
seen = []

def test_steady():
    seen.append("steady")

def test_depends_on_the_order():
    assert not seen

def test_always_fails():
    seen.append("fails")
    assert False
"""


@pytest.mark.processes
def test_a_test_that_depends_on_its_order_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_toy.py").write_text(TOY)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # their imports take most of the time
    options = ["--loads", "1", "--results", str(tmp_path / "results"), str(tmp_path), f"--rootdir={tmp_path}"]
    monkeypatch.setattr("sys.argv", ["", "1", *options])
    assert repeat.main() == 1
    monkeypatch.setattr("sys.argv", ["", "3", *options])
    capsys.readouterr()
    assert repeat.main() == 1
    out = capsys.readouterr().out
    assert "seed 0" not in out.splitlines()[0] and out.count("beside 1 busy processes\n") == 2
    runs = repeat.recorded(tmp_path / "results")
    assert [run["seed"] for run in runs] == [0, 1, 2]
    orders = {json.dumps(run["failed"]) for run in runs}
    assert len(orders) > 1, "each seed has another order"
    assert "test_toy::test_always_fails: 3 of 3" in out and "test_steady" not in out
    assert "test_toy::test_depends_on_the_order: " in out and "test_depends_on_the_order: 3 of 3" not in out


def test_a_run_without_a_report_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pytest ended with 4 and no report"):
        repeat.failed(["--no-such-option"], 0, 0)
