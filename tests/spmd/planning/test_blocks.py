"""Choices over blocks and cuts into stages: as good as an integer linear program finds them, on random instances."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from spmd.planning.blocks import Choice, cut, front
from spmd.planning.elimination import least
from spmd.planning.pipeline import Stage, in_flight, simulate

optimize: Any = pytest.importorskip("scipy.optimize")


def solved(costs: list[float], rows: list[list[float]], low: list[float], high: list[float], whole: list[bool]) -> Any:
    """The least of ``costs @ x`` with ``low <= rows @ x <= high`` and ``x >= 0``; None where there is no such ``x``."""
    limits = optimize.LinearConstraint(rows, low, high)
    found = optimize.milp(costs, constraints=limits, integrality=whole, options={"mip_rel_gap": 0})
    return found.fun if found.success else None


@pytest.mark.parametrize("seed", range(50))
def test_choices_within_memory_are_those_of_an_integer_program(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [
        (draw.randint(1, 6), [Choice(draw.uniform(1, 9), draw.uniform(1, 9)) for _ in range(draw.randint(1, 3))])
        for _ in range(draw.randint(1, 4))
    ]
    found = front(kinds)
    assert all(a.seconds < b.seconds and a.bytes > b.bytes for a, b in pairwise(found))
    budget = draw.uniform(found[-1].bytes * 0.9, found[0].bytes * 1.1)
    flat = [(k, each) for k, (_, choices) in enumerate(kinds) for each in choices]
    rows = [[float(k == kind) for kind, _ in flat] for k in range(len(kinds))]
    counts = [float(count) for count, _ in kinds]
    best = solved(
        [each.seconds for _, each in flat],
        [*rows, [each.bytes for _, each in flat]],
        [*counts, 0.0],
        [*counts, budget],
        [True] * len(flat),
    )
    fitting = [each.seconds for each in found if each.bytes <= budget]
    assert (fitting[0] if fitting else None) == (best if best is None else pytest.approx(best))


@pytest.mark.parametrize("seed", range(50))
def test_cuts_are_those_of_an_integer_program(seed: int) -> None:
    draw = random.Random(seed)
    stages, seconds = draw.randint(2, 6), draw.uniform(0.5, 2)
    count = draw.randint(stages, 24)
    beside = [draw.choice([0.0, draw.uniform(0, 5)]) for _ in range(stages)]
    most = [draw.randint(1, 9) for _ in range(stages)]
    own = [[seconds * (k == stage) for k in range(stages)] + [-1.0] for stage in range(stages)]  # less than the slowest
    room = [[float(k == stage) for k in range(stages)] + [0.0] for stage in range(stages)]
    best = solved(
        [0.0] * stages + [1.0],
        [*own, *room, [1.0] * stages + [0.0]],
        [-1e9] * stages + [1.0] * stages + [count],
        [-each for each in beside] + [float(each) for each in most] + [count],
        [True] * stages + [False],
    )
    found = cut(count, seconds, beside, most)
    slowest = None if found is None else max(n * seconds + end for n, end in zip(found, beside, strict=True))
    assert slowest == (best if best is None else pytest.approx(best))


@pytest.mark.parametrize("seed", range(50))
def test_choices_that_depend_on_each_other_are_those_of_an_integer_program(seed: int) -> None:
    draw = random.Random(seed)
    alone = {k: [draw.uniform(0, 9) for _ in range(draw.randint(1, 4))] for k in range(draw.randint(2, 8))}
    near = [(a, b) for a in alone for b in alone if a < b and draw.random() < 0.5]
    pairs = {(a, b): [[draw.uniform(0, 9) for _ in alone[b]] for _ in alone[a]] for a, b in near}
    names = [(k, None, o, None) for k, costs in alone.items() for o in range(len(costs))]
    names += [(a, b, o, p) for (a, b), costs in pairs.items() for o, row in enumerate(costs) for p in range(len(row))]
    costs = [alone[a][o] if b is None else pairs[a, b][o][p] for a, b, o, p in names]
    rows = [[float(b is None and a == k) for a, b, *_ in names] for k in alone]
    sides = [(end, k, o) for end in near for k in end for o in range(len(alone[k]))]
    rows += [
        [
            -1.0 if (a, b, at) == (k, None, o) else float((a, b) == end and (at if k == a else p) == o)
            for a, b, at, p in names
        ]
        for end, k, o in sides
    ]
    sums = [1.0] * len(alone) + [0.0] * len(sides)
    best = solved(costs, rows, sums, sums, [True] * len(costs))
    found = least(alone, pairs)
    assert found is not None
    total = sum(alone[k][o] for k, o in found.items()) + sum(pairs[a, b][found[a]][found[b]] for a, b in pairs)
    assert total == pytest.approx(best)


@pytest.mark.parametrize(
    "schedule, virtual, waits", [("gpipe", 1, 3.0), ("1f1b", 1, 3.0), ("interleaved", 2, 1.5), ("zb-h1", 1, 1.0)]
)
def test_a_pipeline_waits_as_long_as_its_formula_says(schedule: Any, virtual: int, waits: float) -> None:
    ranks, count = 4, 24
    stages = [Stage(1.0 / virtual, 2.0 / virtual, 1.0 / virtual)] * (ranks * virtual)
    assert simulate(schedule, ranks, count, stages, 0.0).seconds == pytest.approx(3 * count + (ranks - 1) * waits)


def test_the_slowest_stage_sets_the_pace_and_messages_are_waited_for() -> None:
    slow = [Stage(1.0, 2.0), Stage(2.0, 4.0), Stage(1.0, 2.0)]
    assert simulate("1f1b", 3, 9, slow, 0.0).seconds == pytest.approx(
        1 + 9 * 6 + 1 + 2
    )  # it waits once for the last one
    for stages, each in ((slow, 6.0), ([Stage(1.0, 2.0)] * 2, 3.5)):  # a rank that has slack hides its messages
        few, many = (simulate("1f1b", len(stages), count, stages, 0.5).seconds for count in (9, 90))
        assert many - few == pytest.approx(81 * each)


def test_ranks_keep_as_many_micro_batches_as_their_schedule_says() -> None:
    assert in_flight("1f1b", 4, 16) == (4, 3, 2, 1)
    assert in_flight("zb-h1", 4, 16) == (4, 4, 4, 4)
    kept = simulate("1f1b", 2, 2, [Stage(1, 1, 0, 10.0), Stage(1, 1, 0, 7.0)], 0.0).kept
    assert kept == (20.0, 7.0)
