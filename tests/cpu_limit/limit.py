"""A limit for new tests: one second of processor time, or ten by the marker ``costly``, which says why.

``slow_tests.txt`` lists the tests that took more before there was a limit, each with the seconds of its longest
case then. It may only become shorter. A run of all tests compares what each test took with the limit, in the seconds
of the machine that the list was made on: how long the listed ones take, in the median, says how much slower this one
is, and how busy. A test is refused from twice its limit on, and only if it takes that again when it runs for the second
time in a process: whichever test comes first pays for what is imported and built on demand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("slow_tests.txt")
TORCH = "2.13"  # the list has the seconds that tests take with this version
TWICE = "TESTS_RUN_TWICE"  # set to a file, each test runs twice, and the file gets the seconds of the second time
LIMIT, BY_MARK = 1.0, 10.0  # seconds
_REFUSED = 2.0  # times its limit: what a test takes differs by half from run to run
_WHOLE = 0.75  # of the listed tests run in a run of all tests


def listed() -> dict[str, float]:
    """The seconds of the longest case of each listed test, by file and function."""
    lines = (line.split() for line in LIST.read_text().splitlines())
    return {name: float(seconds) for seconds, name in lines}


def function_of(node: str) -> str:
    """The test of which a node is a case."""
    return node.partition("[")[0]


@dataclass
class Times:
    """The processor time of each test of a run, by node, and the nodes that have the marker."""

    seconds: dict[str, float] = field(default_factory=dict)
    marked: set[str] = field(default_factory=set)

    def add(self, node: str, properties: Iterable[tuple[str, object]]) -> None:
        """Note what a report says."""
        of_report = dict(properties)
        if isinstance(seconds := of_report.get("cpu"), float):
            self.seconds[node] = seconds
        if "costly" in of_report:
            self.marked.add(node)

    def pace(self, before: Mapping[str, float]) -> float | None:
        """How many seconds this run takes for one of the list; None if it has not run most of the list."""
        longest: dict[str, float] = {}
        for node, seconds in self.seconds.items():
            if (name := function_of(node)) in before:
                longest[name] = max(seconds, longest.get(name, 0.0))
        if len(longest) < _WHOLE * len(before):
            return None
        return median(seconds / before[name] for name, seconds in longest.items())

    def limit(self, node: str) -> float:
        """The seconds that a test may take."""
        return BY_MARK if node in self.marked else LIMIT

    def too_long(self, before: Mapping[str, float]) -> list[str]:
        """The nodes of tests that are not listed and took twice their limit, or more."""
        if (pace := self.pace(before)) is None:
            return []
        new = {node: seconds for node, seconds in self.seconds.items() if function_of(node) not in before}
        return [node for node, seconds in new.items() if seconds >= _REFUSED * self.limit(node) * pace]


def refused(times: Times, before: Mapping[str, float], again: Mapping[str, float]) -> list[str]:
    """A sentence for each test that took too long both times; ``again``: what each took when it ran alone, twice."""
    pace = times.pace(before)
    slow = [node for node in times.too_long(before) if again.get(node, 0.0) >= _REFUSED * times.limit(node) * pace]
    return [
        f"{node}: expected a new test to take at most {times.limit(node):g} s of processor time, but it took "
        f"{times.seconds[node] / pace:.1f}: make its program smaller or share what it compiles"
        + ("" if node in times.marked else f", or say by @pytest.mark.costly(why) why it needs up to {BY_MARK:g} s")
        for node in slow
    ]


def measured_again(nodes: list[str]) -> dict[str, float]:
    """What each test takes the second time that it runs in a process."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "seconds"
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "0", *nodes]
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        own[TWICE] = str(report)
        subprocess.run(command, cwd=ROOT, env=own, stdout=subprocess.DEVNULL, check=False)
        lines = report.read_text().splitlines() if report.exists() else []
    return {node: float(seconds) for seconds, _, node in (line.partition(" ") for line in lines)}


class CpuLimit:
    """The plugin of the process that prints what tests found: it refuses a run with new tests that take too long."""

    def __init__(self, judges: bool) -> None:
        self.judges, self.times, self.refused = judges, Times(), list[str]()

    @classmethod
    def of(cls, config: pytest.Config) -> CpuLimit:
        """The plugin for a run: only one as the list was made by is judged."""
        options = config.getoption("--exhaustive"), config.getoption("--backend") != "aten", TWICE in os.environ
        return cls(version("torch").startswith(TORCH) and not any(options))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what a test took."""
        if report.when == "call" and report.passed:
            self.times.add(report.nodeid, report.user_properties)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Judge a run in which nothing failed."""
        if into := os.environ.get(TWICE):
            Path(into).write_text("".join(f"{seconds} {node}\n" for node, seconds in self.times.seconds.items()))
        if self.judges and exitstatus == pytest.ExitCode.OK:
            before = listed()
            if slow := self.times.too_long(before):
                self.refused = refused(self.times, before, measured_again(slow))
        if self.refused:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print a sentence for each test that is refused."""
        if self.refused:
            terminalreporter.section("new tests that take too long", red=True)
            terminalreporter.write_line("\n".join(self.refused))


def run_once(item: pytest.Item) -> None:
    """Run a test without a report, and end what is its own alone: what others of its file share stays."""
    behind = SimpleNamespace(listchain=lambda: item.listchain()[:-1], path=item.path)
    runtestprotocol(item, log=False, nextitem=behind)  # type: ignore[arg-type]
