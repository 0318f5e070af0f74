"""The planner of arenas."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from passes.memory.offsets import ALIGNMENT, SMALL, Block, Packed, aligned, live_bytes, pack, total

SIZES = st.one_of(st.integers(0, 200), st.integers(SMALL - 100, 5 * SMALL))
BLOCKS = st.lists(
    st.builds(lambda size, first, more: Block(size, first, first + more), SIZES, *[st.integers(0, 20)] * 2)
)
steady = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])  # no clock, no chance


def assert_apart(blocks: list[Block], offsets: list[int]) -> None:
    """Assert that no two blocks that live at the same time overlap."""
    placed = list(zip(blocks, offsets, strict=True))
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in offsets)
    for k, (one, start) in enumerate(placed):
        for other, begin in placed[:k]:
            together = one.first <= other.last and other.first <= one.last
            apart = start + one.size <= begin or begin + other.size <= start
            assert apart or not together


@steady
@given(BLOCKS)
def test_what_lives_at_the_same_time_does_not_overlap(blocks: list[Block]) -> None:
    assert_apart(blocks, pack(blocks))


@steady
@given(BLOCKS, BLOCKS)
def test_gaps_of_an_arena_that_comes_before_are_used(blocks: list[Block], others: list[Block]) -> None:
    before = Packed(blocks, pack(blocks))
    offsets = pack(others, before)
    assert_apart(blocks + others, [*before.offsets, *offsets])
    for block, offset in zip(others, offsets, strict=True):
        assert offset + block.size <= before.size or offset >= before.size


def test_an_arena_that_is_read_late_holds_what_lives_early() -> None:
    before = Packed([Block(64_000, 8, 9), Block(64_000, 5, 9)], [0, 64_000])
    assert pack([Block(64_000, 0, 7), Block(64_000, 0, 4), Block(64_000, 0, 3)], before) == [0, 64_000, 128_000]


@steady
@given(BLOCKS)
def test_an_arena_is_between_what_lives_at_once_and_all_there_is(blocks: list[Block]) -> None:
    assert live_bytes(blocks) <= total(blocks, pack(blocks)) <= sum(aligned(block.size) for block in blocks)


@steady
@given(BLOCKS)
def test_the_plan_depends_on_the_blocks_alone(blocks: list[Block]) -> None:
    assert pack(blocks) == pack(list(blocks))


def test_blocks_that_follow_each_other_share_memory() -> None:
    blocks = [Block(64_000, k, k) for k in range(9)] + [Block(64, k, k) for k in range(9)]
    assert total(blocks, pack(blocks)) == live_bytes(blocks) == 64_064


def test_the_smallest_gap_that_holds_it() -> None:
    """Between two that live on, a dead one left 30,016 bytes, and another 20,032."""
    blocks = [Block(50_048, 0, 9), Block(40_000, 0, 9), Block(30_016, 0, 1), Block(20_032, 0, 9), Block(20_032, 5, 6)]
    offsets = pack(blocks)
    assert offsets[4] == offsets[2] and total(blocks, offsets) == live_bytes(blocks)


def test_ten_thousand_blocks_take_no_time() -> None:
    """48 layers: what forward keeps for backward is nested, all else is short."""
    kept = [Block(1_000_000 + k, k, 40_000 - k) for k in range(1000)]
    short = [Block(50_000 if k % 5 == 0 else 400, 4 * k, 4 * k + 5) for k in range(9000)]
    start = time.process_time()
    pack(kept + short)
    assert time.process_time() - start < 5
