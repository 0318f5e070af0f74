"""The critical path of small programs, by hand: a product takes a second, a collective three."""

from __future__ import annotations

from typing import Any

import pytest

from passes import Report, Table
from passes.ir.collectives import WAIT
from passes.schedule.critical_path import PathPart, critical_path
from passes.schedule.node_costs import NodeCosts
from passes.schedule.rates import Rates
from passes.schedule.simulation import simulate

from .test_simulation import COMPUTE, TP, hidden_by, link, product, program_of, start


def path(step: Any, seconds: float = 3.0) -> list[tuple[str, str, float, int]]:
    """(what, where, seconds, count) of each part."""
    program = program_of(step)
    timeline = simulate(program, NodeCosts(program, Rates(COMPUTE), Table("by hand", (link(seconds),))))
    found = critical_path(program, timeline)
    assert sum(part.seconds for part in found) == pytest.approx(timeline.seconds)
    return [(part.what, part.where, part.seconds, part.count) for part in found]


@pytest.mark.parametrize(("products", "expected"), [
    (0, [("all_reduce", "dp", 3.0, 1), ("compute", "", 1.0, 1)]),
    (2, [("all_reduce", "dp", 3.0, 1), ("compute", "", 1.0, 1)]),
    (5, [("compute", "", 6.0, 6)]),
])  # fmt: skip
def test_a_collective_is_on_the_path_unless_compute_takes_longer(products: int, expected: list[Any]) -> None:
    assert path(hidden_by(products)) == expected


def test_what_is_read_after_a_wait_follows_it() -> None:
    def step(x: Any) -> Any:
        reduced = WAIT(start(product(x)))
        return product(reduced, 2)

    assert path(step) == [("compute", "", 3.0, 3), ("all_reduce", "dp", 3.0, 1)]


def test_a_wait_holds_up_what_does_not_read_its_result() -> None:
    def step(x: Any) -> Any:
        started = start(x)
        a = product(x)
        waited = WAIT(started)
        return waited, product(a, 4)

    assert path(step) == [("compute", "", 4.0, 4), ("all_reduce", "dp", 3.0, 1)]


def test_collectives_of_an_axis_stand_in_line_and_axes_do_not() -> None:
    def step(x: Any) -> Any:
        first, second = start(x), start(x)
        other = start(x, TP)
        return WAIT(first), WAIT(second), WAIT(other)

    assert path(step) == [("all_reduce", "dp", 6.0, 2)]


def test_reports_have_it() -> None:
    report = Report(name="train", mesh="dp=2", path=(PathPart("all_gather", "dp", 0.25, 3),))
    assert Report.from_dict(report.to_dict()).path == report.path
