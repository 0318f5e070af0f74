"""Threads that move data leave the core to the thread that computes, until that waits or its time slice ends.

gloo moves all data of a group on one thread, which the kernel wakes at each packet. By default it takes the core from a
computing thread at once, and gives it back after some microseconds. Two ranks with a core each, at 2 Gbit/s, exchanged
13 MB in a step: that thread took 9 ms of the core, and 5 ms where it came to several packets at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")


@contextmanager
def behind_compute() -> Iterator[None]:
    """Threads that start in the body do not take a core from one that computes. Does nothing where not on Linux."""
    before = threads()
    yield
    for thread in threads() - before:
        with suppress(OSError):  # it has ended, or this process may not: then it is as without
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def threads() -> set[int]:
    """The ids of this process's threads; none where the system does not show them."""
    return {int(each.name) for each in _THREADS.iterdir()} if _THREADS.exists() else set()
