"""Work beside a run, to see what the gate answers on a machine that does something else."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

_MEAN, _BYTES = 0.02, 8_000_000  # seconds at work; memory that it copies meanwhile, out of the caches


@contextmanager
def disturbance(share: float) -> Iterator[None]:
    """A process that is at work for this share of the time, on any core; none for 0."""
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(share,), daemon=True)
    if share:
        worker.start()
    try:
        yield
    finally:
        if share:
            worker.kill()
            worker.join()


def _work(share: float) -> None:
    """Work and rest in turn, for times that nobody can foresee."""
    drawn, memory = random.Random(0), bytearray(_BYTES)
    while True:
        start = time.perf_counter()
        seconds = drawn.expovariate(1 / _MEAN)
        while time.perf_counter() < start + seconds:
            bytes(memory)
        time.sleep(seconds * (1 - share) / share)
