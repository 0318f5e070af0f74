"""The processor time of this process and of all that it has started: it says what a test costs, on a busy machine too.

Ranks and programs are forked from a server, whose children are no children of this process (Linux; else they are not
counted). What the server itself takes to start is left out: no test chooses to be the first that needs it.
"""

from __future__ import annotations

import cProfile
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from xml.etree import ElementTree

_TICK = 1 / os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Seconds so far, user and system, over all processes and threads."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + _of_forked()


def count_calls(run: Callable[[], object]) -> int:
    """How many functions, also built-in ones, this thread calls in ``run``: the same number on any machine."""
    with cProfile.Profile() as profile:
        run()
    return sum(each.callcount for each in profile.getstats())


def _of_forked() -> float:
    """Of processes that the server of forks has started: those that ended, which it has waited for, and the others."""
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if server is None:
        return 0.0
    ended = sum(_times(server)[2:])
    return ended + sum(sum(_times(process)) for process in _descendants(server))


def _descendants(process: int) -> Iterator[int]:
    with suppress(OSError):  # it has just ended
        for child in map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()):
            yield child
            yield from _descendants(child)


def _times(process: int) -> list[float]:
    """User and system time of a process, and those of its children that have ended."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return [int(field) * _TICK for field in fields[11:15]]
    return [0.0] * 4


def main() -> None:
    """``python -m tests.harness.cpu_time REPORT``: the costliest files and tests of ``pytest --junitxml=REPORT``."""
    files, tests = Counter[str](), Counter[str]()
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        for each in case.iterfind("properties/property[@name='cpu']"):
            seconds, file = float(each.attrib["value"]), case.attrib["classname"]
            files[file] += seconds
            tests[f"{file}::{case.attrib['name']}"] += seconds
    print(f"{sum(files.values()):.0f} s of processor time in {len(tests)} tests")
    for found in (files, tests):
        print(*(f"{seconds:8.1f}  {name}" for name, seconds in found.most_common(40)), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
