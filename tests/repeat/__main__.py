"""``python -m tests.repeat N [paths and options of pytest]``: which tests are not steady.

Runs the tests N times beside 1, 4 and 12 processes that keep cores busy, each time in another order, and prints those
that failed, with how often and the last seed and load. A run that a file of results has is not run again, so that the
same command goes on where it stopped. ``--seed`` gives the first order; run k has the seed + k. To see one again:
``pytest -p tests.repeat.shuffled --shuffle SEED``. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

LOADS = (1, 4, 12)
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"  # ends with its parent


def main() -> int:
    """Parse, run what is missing, print."""
    command = argparse.ArgumentParser("python -m tests.repeat", description=__doc__)
    command.add_argument("times", type=int, help="runs beside each load")
    command.add_argument("--loads", type=int, nargs="+", default=LOADS, help="busy processes")
    command.add_argument("--seed", type=int, default=0, help="of the first order (0)")
    command.add_argument("--results", type=Path, default=Path("runs/repeat.jsonl"), help="a line for each run")
    given, tests = command.parse_known_args()
    given.results.parent.mkdir(parents=True, exist_ok=True)
    for seed, load in _missing(given, tests):
        print(f"seed {seed}, beside {load} busy processes", flush=True)
        run = {"seed": seed, "load": load, "tests": tests, "failed": failed(tests, seed, load)}
        with given.results.open("a") as file:
            file.write(json.dumps(run) + "\n")
    lines = unsteady([run for run in recorded(given.results) if run["tests"] == tests])
    print("\n".join(lines or ["all tests passed in every run"]))
    return bool(lines)


def _missing(given: argparse.Namespace, tests: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(seed, load) of runs that are not in the file of results."""
    known = {(run["seed"], run["load"]) for run in recorded(given.results) if run["tests"] == list(tests)}
    wanted = [(given.seed + k, load) for k in range(given.times) for load in given.loads]
    return (each for each in wanted if each not in known)


def recorded(results: Path) -> list[dict[str, Any]]:
    """The runs in a file of results, which need not exist."""
    return list(map(json.loads, results.read_text().splitlines())) if results.exists() else []


def failed(tests: Sequence[str], seed: int, load: int) -> list[str]:
    """The tests that fail in one run. Raises ``RuntimeError`` if it ran none to its end."""
    with tempfile.TemporaryDirectory() as folder, busy(load):
        report = Path(folder, "report.xml")
        options = ["-q", "-p", "no:cacheprovider", "-p", "tests.repeat.shuffled", f"--shuffle={seed}"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *tests], capture_output=True, text=True
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with {run.returncode} and no report: {run.stdout[-2000:]}{run.stderr}")
        cases = ElementTree.parse(report).iter("testcase")
        return [f"{case.get('classname')}::{case.get('name')}" for case in cases if _has_failed(case)]


def _has_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep as many processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def unsteady(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each test that failed: how often, and where last."""
    lines = {}
    for run in runs:
        for name in run["failed"]:
            times = sum(name in other["failed"] for other in runs)
            lines[name] = f"{name}: {times} of {len(runs)}, last with seed {run['seed']} beside {run['load']}"
    return sorted(lines.values())


if __name__ == "__main__":
    sys.exit(main())
