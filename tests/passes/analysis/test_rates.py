"""Rates of a mesh axis, fitted to measured costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from passes import Axis, Kind, Table
from passes.analysis.collective_algorithms import ALGORITHMS, BUILT_IN, Algorithm, Link, Point
from passes.ir.rates import UNMEASURED, Rate

AXIS = Axis("dp", 2, "0", backend="gloo")
SIZES = (0, 1000)


def line(latency: float, per_byte: float) -> tuple[Point, ...]:
    """Measurements that lie on a line, half of them CPU time."""
    costs = [latency + per_byte * size for size in SIZES]
    return tuple(Point(size, cost / 2, cost / 2) for size, cost in zip(SIZES, costs, strict=True))


def table(curves: dict[tuple[Kind, Algorithm], tuple[Point, ...]], ranks: int = 2) -> Table:
    return Table("test", (Link("gloo", "", ranks, curves),))


def test_a_rate_is_a_line_through_the_smallest_and_the_largest_size() -> None:
    curves = {(Kind.ALL_GATHER, Algorithm.NATIVE): (Point(0, 1.0, 1.0), Point(500, 90.0, 0.0), Point(1000, 4.0, 6.0))}
    assert table(curves).rate(AXIS, "gloo") == Rate(2.0, 8.0 / 500)  # of two ranks each sends half


def test_per_byte_is_of_what_a_rank_sends() -> None:
    """Of a result gathered from four ranks a rank sends a quarter three times; of a sum, twice as much."""
    gather = table({(Kind.ALL_GATHER, Algorithm.NATIVE): line(1.0, 0.003)}, ranks=4)
    reduce = table({(Kind.ALL_REDUCE, Algorithm.NATIVE): line(1.0, 0.006)}, ranks=4)
    assert gather.rate(AXIS, "gloo").per_byte == pytest.approx(0.004)
    assert reduce.rate(AXIS, "gloo").per_byte == pytest.approx(0.004)


def test_every_kind_takes_its_cheapest_algorithm() -> None:
    native, exchange = line(1.0, 0.5), line(2.0, 0.25)
    both = {(Kind.REDUCE_SCATTER, Algorithm.NATIVE): native, (Kind.REDUCE_SCATTER, Algorithm.EXCHANGE): exchange}
    assert table(both).rate(AXIS, "gloo") == Rate(1.0, (252.0 - 1.0) / 500)
    shared = both | {(Kind.REDUCE_SCATTER, Algorithm.SHARED): line(0.5, 0.1)}
    assert table(shared).rate(AXIS, "gloo") == table(both).rate(AXIS, "gloo")
    assert table(shared).rate(replace(AXIS, shared=True), "gloo") == Rate(0.5, 0.2)


def test_the_least_latency_and_the_median_time_per_byte_of_all_kinds_count() -> None:
    curves = {
        (Kind.ALL_GATHER, Algorithm.NATIVE): line(1.0, 0.5),
        (Kind.REDUCE_SCATTER, Algorithm.NATIVE): line(3.0, 1.0),
    }
    curves[Kind.ALL_REDUCE, Algorithm.NATIVE] = line(2.0, 4.0)
    assert table(curves).rate(AXIS, "gloo") == Rate(1.0, 2.0)


@pytest.mark.parametrize("points", [(), (Point(4096, 1.0, 1.0),), (Point(1, 1.0, 1.0), Point(4096, 1.0, 1.0))])
def test_what_says_nothing_of_bytes_gives_the_default(points: tuple[Point, ...]) -> None:
    assert table({(Kind.ALL_GATHER, Algorithm.NATIVE): points}).rate(AXIS, "gloo") is UNMEASURED


def test_the_built_in_rates() -> None:
    """Through shared memory a byte takes a quarter of the time, a collective half of it."""
    assert BUILT_IN.rate(AXIS, "nccl") is UNMEASURED
    messages, memory = (BUILT_IN.rate(replace(AXIS, shared=shared), "gloo") for shared in (False, True))
    assert (messages.latency, memory.latency) == pytest.approx((0.38e-3, 0.22e-3))
    assert (messages.per_byte, memory.per_byte) == pytest.approx((1.51e-9, 0.38e-9), rel=0.01)


def test_tables_of_equal_figures_have_one_digest(tmp_path: Path) -> None:
    BUILT_IN.write(tmp_path / "costs.json")
    assert Table.read(tmp_path / "costs.json").digest == BUILT_IN.digest
    assert replace(BUILT_IN, compute={"memory": 1e10}).digest != BUILT_IN.digest
    assert (
        table({key: line(1.0, 0.5) for key in [(kind, Algorithm.NATIVE) for kind in ALGORITHMS]}).digest
        != BUILT_IN.digest
    )
