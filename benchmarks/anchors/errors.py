"""Errors of estimates by group: step time, the order of layouts, pairs that differ in one option, and memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median

from .rows import Row

_GAP = 1.02  # below it a measured difference is noise


@dataclass(frozen=True)
class Errors:
    """Figures of one group; None where it has no rows of the kind."""

    name: str
    count: int
    unknown: int
    median: float
    p90: float
    mean: float
    spearman: float | None
    regret: float | None
    sweeps: int
    signs: float | None
    pairs: int
    memory: float | None
    with_memory: int


def by_group(rows: Sequence[Row], seconds: Mapping[str, float], memory: Mapping[str, float]) -> list[Errors]:
    """The errors of each group and class, in the order of the table."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[f"{row.cells['group']} / {row.cells['class']}"].append(row)
    return [errors_of(name, members, seconds, memory) for name, members in groups.items()]


def errors_of(name: str, rows: Sequence[Row], seconds: Mapping[str, float], memory: Mapping[str, float]) -> Errors:
    """The errors of some rows; ``seconds`` and ``memory``: the estimates that there are, by id."""
    known = [row for row in rows if row.id in seconds]
    found = sorted(abs(seconds[row.id] / row.seconds - 1) for row in known)
    sweeps = [each for each in _grouped(known, lambda row: [row.cells["sweep"]]) if len(each) > 1]
    orders = [_spearman([seconds[r.id] for r in each], [r.seconds for r in each]) for each in sweeps]
    regrets = [_regret(each, seconds) for each in sweeps]
    pairs = [
        pair for each in _grouped(known, lambda row: row.cells["pair"].split(";")) for pair in combinations(each, 2)
    ]
    pairs = [(a, b) for a, b in pairs if max(a.speed, b.speed) >= _GAP * min(a.speed, b.speed)]
    right = [_sign(a, b, seconds) for a, b in pairs]
    sized = [row for row in known if row.cells["memory_gib"] and row.id in memory]
    sizes = [abs(memory[row.id] / float(row.cells["memory_gib"]) - 1) for row in sized]
    return Errors(
        name,
        len(known),
        len(rows) - len(known),
        quantile(found, 0.5),
        quantile(found, 0.9),
        mean(found) if found else math.nan,
        mean(orders) if orders else None,
        mean(regrets) if regrets else None,
        len(sweeps),
        mean(right) if right else None,
        len(right),
        median(sizes) if sizes else None,
        len(sizes),
    )


def quantile(ordered: Sequence[float], part: float) -> float:
    """Between two values along a straight line."""
    if not ordered:
        return math.nan
    at = (len(ordered) - 1) * part
    low = math.floor(at)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (at - low)


def _grouped(rows: Sequence[Row], keys: Callable[[Row], Sequence[str]]) -> list[list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        for key in filter(None, keys(row)):
            found[key].append(row)
    return list(found.values())


def _regret(sweep: Sequence[Row], seconds: Mapping[str, float]) -> float:
    least = min(seconds[row.id] for row in sweep)
    return mean(row.seconds for row in sweep if seconds[row.id] == least) / min(row.seconds for row in sweep) - 1


def _sign(one: Row, other: Row, seconds: Mapping[str, float]) -> bool:
    estimated = one.tokens / seconds[one.id] - other.tokens / seconds[other.id]
    return estimated * (one.speed - other.speed) > 0


def _spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks; 0 where one side does not vary."""
    a, b = _ranks(one), _ranks(other)
    middle = (len(a) + 1) / 2
    covered = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b))
    return covered / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) + 1) / 2 for value in values]
