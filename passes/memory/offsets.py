"""Plan the offsets of blocks in one arena, so that no two blocks that live at the same time overlap.

Large blocks are placed greedily by size, as in Pisarchyk and Lee, "Efficient memory management for deep neural net
inference" (2020): the largest first, each into the smallest gap that holds it between the blocks placed already that
live when it lives. That compares all pairs, so the small blocks, which are many and weigh little, lie in a part of
their own, where a block takes over the offset of a dead one of its size.

Gaps of an arena that is planned already are used, too, before memory of its own.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..runtime.arena import ALIGNMENT

SMALL = 16_384  # bytes

_Taken = tuple[int, int, int, int, int]  # start, end, number, first, last


@dataclass(frozen=True)
class Block:
    """``size`` bytes that are needed from position ``first`` to ``last``, both included."""

    size: int
    first: int
    last: int


@dataclass(frozen=True)
class Packed:
    """Blocks at their offsets in an arena."""

    blocks: Sequence[Block]
    offsets: Sequence[int]

    @property
    def size(self) -> int:
        """The bytes of the arena."""
        return total(self.blocks, self.offsets)


def pack(blocks: Sequence[Block], before: Packed | None = None) -> list[int]:
    """The offset of each block, in bytes. Depends on the blocks and their order alone.

    ``before``: an arena that comes first in the same range of offsets. A large block lies in a gap of it, or behind
    it, but not across its end.
    """
    large = [k for k, block in enumerate(blocks) if aligned(block.size) > SMALL]
    small = [k for k, block in enumerate(blocks) if aligned(block.size) <= SMALL]
    offsets, end = _by_size(blocks, large, before)
    offsets |= _by_time(blocks, small, end)
    return [offsets[k] for k in range(len(blocks))]


def total(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    """The bytes of an arena with the blocks at these offsets."""
    return max((aligned(block.size) + offset for block, offset in zip(blocks, offsets, strict=True)), default=0)


def live_bytes(blocks: Iterable[Block]) -> int:
    """The most bytes that are needed at one position: no arena can be smaller."""
    changes: list[tuple[int, int]] = []
    for block in blocks:
        changes += [(block.first, aligned(block.size)), (block.last + 1, -aligned(block.size))]
    return max(accumulate(change for _, change in sorted(changes)), default=0)


def aligned(size: int) -> int:
    """``size`` bytes, up to the next multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _by_size(blocks: Sequence[Block], chosen: Sequence[int], before: Packed | None) -> tuple[dict[int, int], int]:
    """The offsets of the chosen blocks, largest first, and where they end."""
    taken: list[_Taken] = _taken_before(before) if before else []
    offsets: dict[int, int] = {}
    for k in sorted(chosen, key=lambda k: (-blocks[k].size, blocks[k].first, k)):
        block, size = blocks[k], aligned(blocks[k].size)
        offsets[k] = _gap((each for each in taken if each[3] <= block.last and block.first <= each[4]), size)
        insort(taken, (offsets[k], offsets[k] + size, k, block.first, block.last))
    return offsets, max((end for _, end, *_ in taken), default=0)


def _taken_before(before: Packed) -> list[_Taken]:
    """The ranges taken in an arena; its end is taken at all times, so that no block lies across it."""
    taken = [
        (offset, offset + aligned(block.size), -1, block.first, block.last)
        for block, offset in zip(before.blocks, before.offsets, strict=True)
    ]
    return sorted([*taken, (before.size, before.size, -1, 0, sys.maxsize)])


def _gap(taken: Iterable[_Taken], size: int) -> int:
    """The start of the smallest gap of at least ``size`` bytes between the taken ones, else the end of all."""
    best: tuple[int, int] | None = None
    free = 0
    for start, end, *_ in taken:
        if start - free >= size and (best is None or start - free < best[0]):
            best = start - free, free
        free = max(free, end)
    return free if best is None else best[1]


def _by_time(blocks: Sequence[Block], chosen: Sequence[int], end: int) -> dict[int, int]:
    """The offsets of the chosen blocks from ``end`` on, in the order in which they start to live."""
    offsets: dict[int, int] = {}
    living: dict[int, list[tuple[int, int]]] = {}  # by size: until when, offset
    for k in sorted(chosen, key=lambda k: (blocks[k].first, k)):
        block, size = blocks[k], aligned(blocks[k].size)
        same = living.setdefault(size, [])
        if same and same[0][0] < block.first:
            _, offsets[k] = same.pop(0)
        else:
            offsets[k], end = end, end + size
        insort(same, (block.last, offsets[k]))
    return offsets
