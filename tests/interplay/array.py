"""Rows of the covering array: each possible pair of values is in one, in as few rows as a greedy choice finds.

The choice is that of AETG (Cohen, Dalal, Fredman and Patton, 1997): a row begins with a pair that no row has yet, and
takes for each other dimension, in random order, the value that covers most of what is left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations, product

from .dimensions import DECIDING, DIMENSIONS, REFUSED, TOGETHER, Row, is_possible, why_impossible
from .meshes import world

Pair = frozenset[tuple[str, str]]  # of values of two dimensions; ``TOGETHER`` has some of more
_TOGETHER = [frozenset(each.items()) for each in TOGETHER]
_TRIES = 8  # rows made for each that is taken
_TRIED = 40  # rows of which some are within a time
_SECONDS = 9.0  # of a rank


def pairs() -> set[Pair]:
    """All pairs of values of two dimensions that some row has, and what else rows have together."""
    draw, found = random.Random(0), {*_TOGETHER}
    for one, other in combinations(DIMENSIONS, 2):
        for value, second in product(DIMENSIONS[one], DIMENSIONS[other]):
            if frozenset({(one, value), (other, second)}) not in found:
                found |= covered(completed({one: value, other: second}, draw) or {})
    return found


def covered(row: Row) -> set[Pair]:
    """The pairs that a row has, and what else it has together."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)} | {t for t in _TOGETHER if t <= row.items()}


def completed(begun: Row, draw: random.Random, left: set[Pair] | None = None) -> Row | None:
    """A possible row with these values, which covers much of what is ``left``; None if there is none."""
    if not is_possible(begun):
        return None
    missing = [each for each in DIMENSIONS if each not in begun]
    draw.shuffle(missing)
    missing.sort(key=lambda each: DECIDING.index(each) if each in DECIDING else len(DECIDING))
    return _filled(begun, missing, draw, left or set())


def _filled(row: Row, missing: Sequence[str], draw: random.Random, left: set[Pair]) -> Row | None:
    if not missing:
        return row
    dimension, *others = missing
    values = [value for value in DIMENSIONS[dimension] if is_possible({**row, dimension: value})]
    draw.shuffle(values)
    values.sort(key=lambda value: -sum(frozenset({(dimension, value), each}) in left for each in row.items()))
    for value in values:
        found = _filled({**row, dimension: value}, others, draw, left)
        if found is not None:
            return found
    return None


@cache
def rows(seed: int = 0) -> list[Row]:
    """Rows that have all pairs, in the dimensions' order. Made once in a process, and not to be changed."""
    draw, left, found = random.Random(seed), pairs(), list[Row]()
    while left:
        first = min(left, key=sorted)
        made = [completed(dict(first), draw, left) for _ in range(_TRIES)]
        best = max((row for row in made if row is not None), key=lambda row: len(covered(row) & left))
        left -= covered(best)
        found.append({dimension: best[dimension] for dimension in DIMENSIONS})
    draw.shuffle(found)
    return found


def rows_of_triples(seed: int, count: int) -> list[Row]:
    """Some rows, each with three values that are together in none before it, drawn at random."""
    draw, had, found = random.Random(seed), set[frozenset[tuple[str, str]]](), list[Row]()
    while len(found) < count:
        begun = {name: draw.choice(DIMENSIONS[name]) for name in draw.sample([*DIMENSIONS], 3)}
        row = None if frozenset(begun.items()) in had else completed(begun, draw)
        if row is not None:
            found.append({dimension: row[dimension] for dimension in DIMENSIONS})
            had |= {frozenset(each) for each in combinations(row.items(), 3)}
    return found


def rows_within(seed: int, seconds: float) -> list[Row]:
    """Rows of triples that take about so much processor time together, and none of them more than half of it."""
    found, left = list[Row](), seconds
    for row in rows_of_triples(seed, _TRIED):
        if (takes := _seconds(row)) <= min(left, seconds / 2):
            found, left = [*found, row], left - takes
    return found


def _seconds(row: Row) -> float:
    """About how long a row takes, from those that were measured: each rank compiles for itself in most."""
    processes = 1.5 if row["cache"] == "warm" else 1.0
    processes *= 1.5 if row["between"] == "new process" else 1.0
    processes *= 3.0 if row["memory"] == "tight" else 1.0  # the budget is found by compiling
    processes *= 6.0 if row["backend"] == "inductor" else 1.0  # kernels, for each rank and size
    processes *= 1.5 if row["micro_batches"] != "1" else 1.0
    return _SECONDS * processes * world(row)


def plain_row(**values: str) -> Row:
    """The row with these values, and else the first one of each dimension."""
    row = {name: values.pop(name, first) for name, (first, *_) in DIMENSIONS.items()}
    if values or not all(value in DIMENSIONS[name] for name, value in row.items()):
        raise ValueError(f"expected values of dimensions.py, got {values or row}")
    return row


def refused_row(sentence: str) -> Row:
    """The plainest row that is refused by one sentence of ``REFUSED``, and by no other."""
    plain = {name: values[0] for name, values in DIMENSIONS.items()}
    for count in range(1, 5):
        for names in combinations(DECIDING, count):
            for values in product(*(DIMENSIONS[name] for name in names)):
                row = plain | dict(zip(names, values, strict=True))
                if REFUSED[sentence](row) and why_impossible(row) == {sentence}:
                    return row
    raise ValueError(f"no row of {DECIDING} is refused by {sentence!r} alone")


def described(row: Row) -> str:
    """What of a row is not the first value of its dimension, as ``--only`` takes it."""
    return ", ".join(f"{name}={value}" for name, value in row.items() if value != DIMENSIONS[name][0])
