"""Exact choices over the blocks of a model: what each of them keeps, and where stages of a pipeline begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Choice:
    """One way to run a block: its seconds in a step, and the bytes that it keeps."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Chosen(Choice):
    """Seconds and bytes of all blocks, and for each kind how many take each of its choices."""

    counts: tuple[tuple[int, ...], ...] = ()


def front(kinds: Sequence[tuple[int, Sequence[Choice]]]) -> list[Chosen]:
    """The choices of which none is both faster and smaller, the fastest first.

    ``kinds``: how many equal blocks there are, and what each may do. Of equal blocks it counts only how many do what;
    what is slower and larger than another choice for the same blocks is left out before the next kind is added.
    """
    found = [Chosen(0.0, 0.0)]
    for count, choices in kinds:
        found = _undominated(
            Chosen(
                each.seconds + sum(n * choice.seconds for n, choice in zip(counts, choices, strict=True)),
                each.bytes + sum(n * choice.bytes for n, choice in zip(counts, choices, strict=True)),
                (*each.counts, counts),
            )
            for each in found
            for counts in _divisions(count, len(choices))
        )
    return found


@cache
def _divisions(count: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to divide so many equal blocks among choices."""
    if parts == 1:
        return [(count,)]
    return [(n, *rest) for n in range(count + 1) for rest in _divisions(count - n, parts - 1)]


def _undominated(found: Iterator[Chosen]) -> list[Chosen]:
    kept: list[Chosen] = []
    for each in sorted(found, key=lambda each: (each.seconds, each.bytes)):
        if not kept or each.bytes < kept[-1].bytes:
            kept.append(each)
    return kept


def cut(count: int, seconds: float, beside: Sequence[float], most: Sequence[int]) -> tuple[int, ...] | None:
    """Cut ``count`` equal blocks into stages, so that the slowest takes the least time; None if none can.

    ``seconds``: of a block; ``beside``: of what each stage has besides; ``most``: the blocks that it has memory for.
    Each has one or more. A block goes where it makes the least longest stage, the later one if that is equal: no other
    cut has a shorter longest stage, since what a stage takes only grows.
    """
    if sum(most) < count or min(most) < 1 or count < len(most):
        return None
    found = [1] * len(most)
    for _ in range(count - len(most)):
        open_ = [k for k, n in enumerate(found) if n < most[k]]
        found[min(open_, key=lambda k: (beside[k] + (found[k] + 1) * seconds, -k))] += 1
    return tuple(found)
