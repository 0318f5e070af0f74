"""What other processes compute counts as a test's own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from .cpu_time import cpu_seconds
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
