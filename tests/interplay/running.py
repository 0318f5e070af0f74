"""The processes of a row, one after the other: new ones where a row asks for them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..harness.pool import Ranks
from .checking import checked
from .comparing import differences
from .dimensions import Row
from .meshes import world
from .training import CALLS

_TIMEOUT = 500.0  # seconds for a process of a row: four ranks that each trace eight programs on a busy machine


def is_on_two_hosts(row: Row) -> bool:
    """Whether the ranks of a row live on two hosts."""
    return row["transport"] == "two hosts"


def found_in(ranks: Ranks, row: Row, fault: str = "") -> list[str]:
    """A line for each difference between a row and the plain step, on all ranks. Raises ``RankError``.

    ``fault``: the name of one that is planted.
    """
    found = set[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number, (calls, is_warm) in enumerate(_processes(row)):
            if number or row["cache"] == "warm":  # what other tests import makes a process another one to the cache
                ranks.renew()
            given = (row, Path(folder), calls, is_warm, fault)
            for lines in ranks.run(world(row), differences, *given, timeout=_TIMEOUT):
                found |= {*lines}
    return sorted(found)


def checks_of(ranks: Ranks, row: Row, fault: str = "") -> tuple[list[str], list[str]]:
    """A line for what ``verify`` or ``certify`` finds wrong in a row, and for what they cannot show."""
    with tempfile.TemporaryDirectory() as folder:
        (lines,) = ranks.run(1, checked, row, Path(folder), fault, timeout=_TIMEOUT)
    return [each for each in lines if not each.startswith("not ")], [each for each in lines if each.startswith("not ")]


def _processes(row: Row) -> Iterator[tuple[range, bool]]:
    """The calls of each process, and whether an earlier one has made them."""
    parts = [range(2), range(2, CALLS)] if row["between"] == "new process" else [range(CALLS)]
    for is_warm in (False, True) if row["cache"] == "warm" else (False,):
        for calls in parts:
            yield calls, is_warm
