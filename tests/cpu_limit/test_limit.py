"""New tests that take too long are found, on a machine of any speed, and those that pay for others are not."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from . import limit
from .limit import LIST, ROOT, CpuLimit, Times, listed, measured_again, refused

MOST = 523  # listed tests: if there are fewer, this becomes less with them
LISTED = {f"tests/test_a.py::test_{k}": 1.0 + k for k in range(8)}


def times_of(pace: float, **seconds: float) -> Times:
    """A run of all listed tests, one of which has become quick, on a machine of this pace; and of new ones."""
    times = Times()
    for node, before in LISTED.items():
        times.add(f"{node}[case]", [("cpu", 0.1 if node.endswith("_3") else before * pace)])
    for name, each in seconds.items():
        times.add(
            f"tests/test_b.py::{name}", [("cpu", each * pace), *([("costly", "why")] if "marked" in name else [])]
        )
    return times


def test_the_list_has_tests_that_are_there_and_becomes_no_longer() -> None:
    names = [*listed()]
    assert len(names) == len(LIST.read_text().splitlines()) <= MOST, "make the new test cheaper, or see costly"
    for file in {name.partition("::")[0] for name in names}:
        functions = {
            node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        gone = {name.partition("::")[2] for name in names if name.startswith(f"{file}::")} - functions
        assert not gone, f"{LIST}: remove the lines of what is no longer in {file}: {gone}"


@pytest.mark.parametrize("pace", [0.5, 1.0, 3.0])
def test_a_test_is_refused_if_it_takes_twice_its_limit_both_times(pace: float) -> None:
    times = times_of(pace, short=1.9, long=2.1, first=9.0, marked=9.0, marked_long=21.0)
    names = [f"tests/test_b.py::{name}" for name in ("long", "first", "marked_long")]
    assert times.too_long(LISTED) == names
    long, marked = refused(times, LISTED, dict(zip(names, (2.1 * pace, 0.9 * pace, 21.0 * pace), strict=True)))
    assert (
        long.startswith("tests/test_b.py::long: expected a new test to take at most 1 s") and "but it took 2.1:" in long
    )
    assert "@pytest.mark.costly(why)" in long
    assert "marked_long: expected a new test to take at most 10 s" in marked and "costly" not in marked


def test_a_part_of_the_tests_says_nothing_of_the_machine() -> None:
    times = times_of(1.0, long=100.0)
    times.seconds = {node: each for node, each in times.seconds.items() if "test_a" not in node or "_1" in node}
    assert times.pace(LISTED) is None and times.too_long(LISTED) == []


HOOKS = ("pytest_addoption", "pytest_configure", "pytest_runtest_call", "pytest_runtest_protocol")
FILE = """
import time
import pytest

@pytest.fixture(scope="module")
def built():
    began = time.process_time()
    while time.process_time() - began < {first}:
        pass

@pytest.fixture
def own(tmp_path):
    (tmp_path / "made").mkdir()  # once for each time
    yield

def test_first(built, own):
    global been
    began, been = time.process_time(), "been" in globals()
    while time.process_time() - began < (0.05 if been else {first}):
        pass
"""


@pytest.mark.costly("it starts pytest")
@pytest.mark.processes
def test_the_second_time_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the first one imports and builds, and with fixtures of its own."""
    file = tmp_path / "test_built.py"
    file.write_text(FILE.format(first=0.3))
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {', '.join(HOOKS)}\n")
    monkeypatch.setattr(limit, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (seconds,) = measured_again([str(file)]).values()
    assert seconds < 0.2


def test_a_run_with_such_a_test_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "listed", lambda: LISTED)
    monkeypatch.setattr(limit, "measured_again", lambda nodes: dict.fromkeys(nodes, 3.0))
    for judges, status in ((True, pytest.ExitCode.TESTS_FAILED), (False, pytest.ExitCode.OK)):
        plugin, session = CpuLimit(judges), SimpleNamespace(exitstatus=pytest.ExitCode.OK)
        plugin.times = times_of(1.0, long=3.0, short=0.3)
        plugin.pytest_sessionfinish(session, session.exitstatus)  # type: ignore[arg-type]
        assert session.exitstatus == status and len(plugin.refused) == judges
