"""Reductions that are left in flight: the simulated call that finishes those of the call before, and their order."""

from __future__ import annotations

from typing import Any

import torch

from passes import Phase, Program, Table, UpdateInPlace, run
from passes.analysis.collective_algorithms import Algorithm, Link, Point
from passes.ir.collectives import Kind
from passes.schedule.node_costs import NodeCosts
from passes.schedule.rates import Rates
from passes.schedule.simulation import simulate
from passes.schedule.start_in_order import start_last, starts_to_hold
from passes.update.cut_and_join import Halves, cut, join

from ..programs import all_reduce, f64
from ..update.test_cut_and_join import made
from .test_simulation import COMPUTE, ROWS

aten = torch.ops.aten


def layers(w: Any, v: Any, u: Any, x: Any, lr: Any) -> Any:
    """Three products forward and three backward, the last layer's first; each gradient is reduced."""
    one = aten.mm.default(x, w)
    two = aten.mm.default(one, v)
    three = aten.mm.default(two, u)
    back_u = aten.mm.default(three, three)
    grad_u = all_reduce(back_u)
    back_v = aten.mm.default(back_u, two)
    grad_v = all_reduce(back_v)
    grad_w = all_reduce(aten.mm.default(back_v, one))
    loss = aten.sum.default(three)
    return loss, aten.sub.Tensor(w, grad_w), aten.sub.Tensor(v, grad_v), aten.sub.Tensor(u, grad_u)


def steady(held: list[str]) -> Program:
    """The end of a step and the start of the next; ``held``: the collectives that start last."""
    size = f64(ROWS, ROWS)
    program = made(layers, updates={1: "w", 2: "v", 3: "u"}, w=size, v=size, u=size, x=size)
    for k, node in enumerate(program.graph.find_nodes(op="call_function", target=aten.mm.default)):
        node.meta["phase"] = Phase.FORWARD if k < 3 else Phase.BACKWARD
    halves = cut(program)
    assert isinstance(halves, Halves)
    start_last(halves.start, held)
    start, end = (run(half, [UpdateInPlace()]) for half in (halves.start, halves.end))
    return join(Halves(start, end, halves.numbers))


def costs_of(program: Program, seconds: float) -> NodeCosts:
    """A product takes a second, and an all_reduce so many."""
    points = (Point(1, seconds, 0.0), Point(1 << 40, seconds, 0.0))
    link = Link("gloo", "dp", 2, {(Kind.ALL_REDUCE, Algorithm.NATIVE): points})
    return NodeCosts(program, Rates(COMPUTE), Table("by hand", (link,)), backend="gloo")


def simulated(held: list[str], seconds: float) -> float:
    program = steady(held)
    return simulate(program, costs_of(program, seconds), with_memory=False).seconds


def test_what_the_call_before_left_in_flight_is_waited_for() -> None:
    """Reductions of 4 s can start after 4, 5 and 6 s: 10 s are left when a call ends. Forward reads the last first."""
    assert simulated([], 0.5) == 6.5
    assert simulated([], 4.0) == 6 + 10


def test_those_that_stand_in_line_start_in_the_order_in_which_they_are_read() -> None:
    """The first layer's comes 6 s after the call has ended, and one product hides a second of each other."""
    program = steady([])
    held = starts_to_hold(program, costs_of(program, 4.0))
    assert held == ["all_reduce_2", "all_reduce_1"]
    assert simulated(held, 4.0) < simulated([], 4.0)


def test_ranks_with_unequal_parts_keep_the_order() -> None:
    """They estimate different times, and have to start collectives in one order."""
    program = steady([])
    next(iter(program.collectives())).meta["uneven"] = True
    assert starts_to_hold(program, costs_of(program, 4.0)) == []


def test_what_is_hidden_keeps_its_order() -> None:
    program = steady([])
    assert starts_to_hold(program, costs_of(program, 0.5)) == []
