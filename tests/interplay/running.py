"""The processes of a row, one after the other: new ones where a row asks for them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..harness.pool import Ranks
from .comparing import differences, world
from .dimensions import Row
from .training import CALLS

_TIMEOUT = 500.0  # seconds for a process of a row: four ranks that each trace eight programs on a busy machine


def found_in(ranks: Ranks, row: Row) -> list[str]:
    """A line for each difference between a row and the plain step, on all ranks. Raises ``RankError``."""
    found = set[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number, (calls, is_warm) in enumerate(_processes(row)):
            if number:
                ranks.renew()
            for lines in ranks.run(world(row), differences, row, Path(folder), calls, is_warm, timeout=_TIMEOUT):
                found |= {*lines}
    return sorted(found)


def _processes(row: Row) -> Iterator[tuple[range, bool]]:
    """The calls of each process, and whether an earlier one has made them."""
    parts = [range(2), range(2, CALLS)] if row["between"] == "new process" else [range(CALLS)]
    for is_warm in (False, True) if row["cache"] == "warm" else (False,):
        for calls in parts:
            yield calls, is_warm
