"""What other processes compute counts as a test's own."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from .cpu_time import cpu_seconds, main
from .pool import Ranks

LONG = 0.1  # seconds; Linux counts in hundredths


def job(rank: int, world: int) -> None:
    began = time.process_time()
    while time.process_time() - began < LONG:
        pass


@pytest.mark.processes
def test_processes_that_have_ended_count() -> None:
    before = cpu_seconds()
    subprocess.run([sys.executable, "-S", "-c", f"import time\nwhile time.process_time() < {LONG}: pass"], check=True)
    assert cpu_seconds() - before >= LONG


@pytest.mark.skipif(sys.platform != "linux", reason="other processes are found in /proc")
def test_ranks_count(ranks: Ranks) -> None:
    ranks.run(2, job)  # they have started
    before = cpu_seconds()
    ranks.run(2, job)
    assert cpu_seconds() - before >= 2 * LONG - 0.04


def test_the_costliest_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = (
        '<testcase classname="tests.{}" name="{}"><properties><property name="cpu" value="{}"/></properties></testcase>'
    )
    cases = [case.format(*each) for each in (("a", "one", 1.25), ("b", "two", 2.0), ("a", "three", 0.75))]
    (tmp_path / "report.xml").write_text(f"<testsuites>{''.join(cases)}<testcase/></testsuites>")
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "report.xml")])
    main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "4 s of processor time in 3 tests"
    assert [line.split()[1] for line in lines if line] == ["tests.a", "tests.b", *TESTS]


TESTS = ("tests.b::two", "tests.a::one", "tests.a::three")
