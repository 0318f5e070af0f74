"""What collectives cost: between the measured points, along the axis that fits best, read back as written."""

from __future__ import annotations

from pathlib import Path

import pytest

from passes import Axis, Kind, Table
from passes.analysis.collective_algorithms import ALGORITHMS, BUILT_IN, Algorithm, Link, Point, algorithms_along

REDUCE = Kind.ALL_REDUCE
NATIVE, SHARED = Algorithm.NATIVE, Algorithm.SHARED


def link(axis: str = "dp", ranks: int = 2, backend: str = "gloo") -> Link:
    curves = {
        (REDUCE, NATIVE): (Point(100, 1.0, 1.0), Point(300, 3.0, 3.0)),
        (REDUCE, SHARED): (Point(100, 2.0, 1.0), Point(300, 2.0, 1.0)),
    }
    return Link(backend, axis, ranks, curves)


def test_a_cost_is_the_time_to_the_result_and_the_time_taken_from_compute() -> None:
    assert Point(1, 2.0, 0.5).cost == 2.5


@pytest.mark.parametrize(("size", "cost"), [(1, 2.0), (100, 2.0), (200, 4.0), (300, 6.0), (600, 12.0)])
def test_between_points_runs_a_straight_line(size: int, cost: float) -> None:
    """Below the first point the latency counts alone, beyond the last one the bandwidth."""
    assert link().cost(REDUCE, NATIVE, size) == cost


def test_what_was_not_measured_has_no_cost() -> None:
    assert link().cost(Kind.ALL_GATHER, NATIVE, 1) is None
    assert link().cheapest(Kind.ALL_GATHER, 1, (NATIVE, SHARED)) is NATIVE


def test_the_cheapest_depends_on_the_size() -> None:
    assert link().cheapest(REDUCE, 100, (NATIVE, SHARED)) is NATIVE
    assert link().cheapest(REDUCE, 300, (NATIVE, SHARED)) is SHARED
    assert link().cheapest(REDUCE, 300, (NATIVE,)) is NATIVE


def test_the_link_of_the_axis_comes_before_that_of_as_many_ranks() -> None:
    links = (link("tp", 4), link("dp", 8), link("dp", 2), link("dp", 4, "nccl"))
    table = Table("four", links)
    assert table.link(Axis("dp", 3, "0"), "gloo") is links[2]
    assert table.link(Axis("pp", 4, "0"), "gloo") is links[0]
    assert table.link(Axis("pp", 4, "0"), "nccl") is links[3]
    assert table.link(Axis("dp", 4, "0"), "mpi") is None


def test_algorithms_that_a_backend_can_perform() -> None:
    apart, together = Axis("dp", 2, "0"), Axis("dp", 2, "0", shared=True)
    assert algorithms_along(apart, REDUCE, "gloo") == (NATIVE,)
    assert algorithms_along(together, REDUCE, "gloo") == (NATIVE, SHARED)
    assert algorithms_along(together, Kind.ALL_GATHER, "nccl") == (NATIVE, Algorithm.COALESCED)
    assert algorithms_along(together, Kind.ALL_GATHER, "unknown") == (NATIVE,)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = Table("mine", (link(), link("tp", 4)), {"memory": 1e9})
    table.write(tmp_path / "costs.json")
    read = Table.read(tmp_path / "costs.json")
    assert (read.links, read.compute, repr(read)) == (table.links, table.compute, "Table('costs.json')")


@pytest.mark.parametrize("text", ["", "[]", '{"links": []}', '{"compute": {}, "links": [{"backend": "gloo"}]}'])
def test_any_other_file_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"expected .*other\.json to be a table of costs"):
        Table.read(tmp_path / "other.json")


def test_the_built_in_table_has_what_gloo_can_do() -> None:
    (built_in,) = BUILT_IN.links
    together = Axis("dp", 2, "0", shared=True)
    for kind in ALGORITHMS.keys() - {Kind.ALL_TO_ALL}:  # which goes by the rate of its axis until it is measured
        for algorithm in algorithms_along(together, kind, "gloo"):
            costs = [built_in.cost(kind, algorithm, size) for size in (1 << 20, 1 << 24)]
            assert costs[0] is not None and costs[1] is not None and costs[0] < costs[1]
