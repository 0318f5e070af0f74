"""Simulated ranks: one process stands for one rank of a fake world after the other, as ``spmd.verify`` lets it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Simulated:
    """The rank that this process stands for. ``backend`` moves its data; ``shared``: all ranks are on one host."""

    rank: int
    backend: str = "gloo"
    shared: bool = True


_now: Simulated | None = None


def simulated() -> Simulated | None:
    """The rank that this process stands for, None where it is a rank itself."""
    return _now


@contextmanager
def standing_for(rank: Simulated) -> Iterator[None]:
    """Let this process stand for ``rank``."""
    global _now
    before, _now = _now, rank
    try:
        yield
    finally:
        _now = before
