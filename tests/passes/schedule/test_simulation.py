"""The simulated step of small programs, by hand: a product takes a second, and so does a byte that is sent.

Everything else is free, so each timeline is a few whole numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import Axis, Kind, Mesh, Program, Realise, Table, fill_vals, run
from passes.analysis.collective_algorithms import Algorithm, Link, Point
from passes.ir.collectives import WAIT, c10d
from passes.runtime.host_memory import to_device, to_host, wait_copy
from passes.schedule.node_costs import NodeCosts
from passes.schedule.rates import Rates
from passes.schedule.simulation import Cause, Timeline, in_turn, simulate

from ..programs import GROUP, f64

aten = torch.ops.aten
ROWS = 8
SECOND = 2 * ROWS**3  # FLOPs of a product of two matrices (8, 8)
NOTHING = math.inf
COMPUTE: Mapping[str, float] = {
    "matmul float32": SECOND,
    "matmul float64": SECOND,
    "memory": NOTHING,
    "transcendental": NOTHING,
    "launches": NOTHING,
    "views": NOTHING,
}
TP = "1"


def link(seconds: float, cpu: float = 0.0, algorithm: Algorithm = Algorithm.NATIVE) -> Link:
    """Collectives that take so long, whatever their size."""
    kinds = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    points = (Point(1, seconds, cpu), Point(1 << 40, seconds, cpu))
    return Link("gloo", "dp", 2, {(kind, algorithm): points for kind in kinds})


def timeline(step: Any, *links: Link, compute: Mapping[str, float] = COMPUTE, **options: Any) -> Timeline:
    program = program_of(step)
    return simulate(program, NodeCosts(program, Rates(compute), Table("by hand", links), **options))


def program_of(step: Any, shared: bool = False) -> Program:
    """The program of a function of one matrix, on two axes of two ranks."""
    graph_module = torch.fx.symbolic_trace(step)
    (x,) = graph_module.graph.find_nodes(op="placeholder")
    with FakeTensorMode() as mode:
        x.meta["val"] = mode.from_tensor(f64(ROWS, ROWS))
    axes = [Axis(name, 2, group, backend="gloo", shared=shared) for name, group in (("dp", GROUP), ("tp", TP))]
    program = Program.from_graph(graph_module, mesh=Mesh(tuple(axes)))
    fill_vals(program)
    return program


def start(x: Any, group: str = GROUP) -> Any:
    return c10d.all_reduce.default(x, "sum", group)


def product(x: Any, count: int = 1) -> Any:
    for _ in range(count):
        x = aten.mm.default(x, x)
    return x


def hidden_by(count: int) -> Any:
    """A collective that starts after one product, and is waited for after ``count`` more."""

    def step(x: Any) -> Any:
        a = product(x)
        started = start(a)
        b = product(a, count)
        return WAIT(started), b

    return step


@pytest.mark.parametrize(("products", "exposed"), [(0, 3.0), (2, 1.0), (3, 0.0), (5, 0.0)])
def test_compute_hides_a_collective_as_long_as_it_runs(products: int, exposed: float) -> None:
    found = timeline(hidden_by(products), link(3.0))
    assert found.seconds == 1 + products + exposed
    assert (found.compute, found.communication, found.exposed) == (1 + products, 3.0, exposed)
    (transfer,) = found.transfers
    assert (transfer.start, transfer.end, transfer.queue) == (1.0, 4.0, "dp")
    assert sum(seconds for _, seconds in transfer.behind) == 3.0 - exposed


def test_spans_of_compute_and_of_the_queue() -> None:
    spans = [(span.queue, span.start, span.end) for span in timeline(hidden_by(2), link(1.0)).spans]
    assert spans == [("", 0.0, 1.0), ("", 1.0, 2.0), ("", 2.0, 3.0), ("dp", 1.0, 2.0)]


def two_starts(group: str) -> Any:
    def step(x: Any) -> Any:
        first, second = start(x), start(x, group)
        a = product(x, 4)
        return WAIT(second), WAIT(first), a

    return step


def test_collectives_of_one_axis_stand_in_line() -> None:
    found = timeline(two_starts(GROUP), link(3.0))
    assert [(each.start, each.end, each.exposed) for each in found.transfers] == [(0.0, 3.0, 0.0), (3.0, 6.0, 2.0)]
    assert found.seconds == 6.0


def test_what_stands_in_line_before_it_is_exposed_as_well() -> None:
    def step(x: Any) -> Any:
        first, second = start(x), start(x)
        a = WAIT(second)
        return a, WAIT(first), product(x)

    found = timeline(step, link(3.0))
    assert [each.exposed for each in found.transfers] == [3.0, 3.0]
    assert (found.seconds, found.exposed) == (7.0, 6.0)


def test_the_cause_of_what_is_exposed() -> None:
    def late(x: Any) -> Any:
        a = product(x)
        b = product(a, 2)
        return WAIT(start(a)), b

    assert [each.cause for each in timeline(hidden_by(0), link(3.0)).transfers] == [Cause.DEPENDENCY]
    assert [each.cause for each in timeline(hidden_by(3), link(3.0)).transfers] == [None]
    assert [each.cause for each in timeline(two_starts(GROUP), link(3.0)).transfers] == [None, Cause.ORDER]
    assert [each.cause for each in timeline(late, link(3.0)).transfers] == [Cause.ORDER]
    assert [each.cause for each in timeline(late, link(7.0)).transfers] == [Cause.DEPENDENCY]  # 5 of 7 s, if earlier
    assert [each.cause for each in timeline(hidden_by(4), link(3.0, cpu=3.0)).transfers] == [Cause.CORE]
    program = program_of(late)
    program.note_collectives()
    (node,) = program.collectives()
    node.meta["collective"] = replace(node.meta["collective"], ahead=1)
    (transfer,) = simulate(program, NodeCosts(program, Rates(COMPUTE), Table("by hand", (link(3.0),)))).transfers
    assert transfer.cause == Cause.MEMORY and transfer.exposed == 3.0


def test_axes_communicate_beside_each_other() -> None:
    found = timeline(two_starts(TP), link(3.0), replace(link(3.5), axis="tp"))
    assert [(each.queue, each.start, each.end) for each in found.transfers] == [("dp", 0.0, 3.0), ("tp", 0.0, 3.5)]
    assert (found.seconds, found.exposed) == (4.0, 0.0)


def test_a_wait_that_stands_early_blocks_what_follows() -> None:
    def step(x: Any) -> Any:
        return (product(WAIT(start(x)), 2),)

    found = timeline(step, link(3.0))
    assert (found.seconds, found.exposed) == (5.0, 3.0)


@pytest.mark.parametrize(("products", "seconds", "exposed"), [
    (0, 4.0, 4.0),
    (1, 4.0, 3.0),  # of 4 s in flight, a fourth of the core is taken: 3 s are left
    (3, 4.0, 1.0),
    (5, 6.0, 1.0),
])  # fmt: skip
def test_the_cpu_time_of_messages_is_taken_from_compute(products: int, seconds: float, exposed: float) -> None:
    found = timeline(hidden_by(products), link(4.0, cpu=1.0))
    assert (found.seconds, found.compute, found.exposed) == pytest.approx((1 + seconds, 1 + products, exposed))


def test_messages_that_keep_a_core_busy_hide_behind_nothing() -> None:
    found = timeline(hidden_by(5), link(2.0, cpu=2.5))
    assert (found.seconds, found.compute, found.exposed) == (8.0, 6.0, 2.0)


def test_two_axes_take_cpu_time_together() -> None:
    found = timeline(two_starts(TP), link(4.0, cpu=1.0), replace(link(2.0, cpu=1.0), axis="tp"))
    assert found.seconds == 6.0  # 2 s at a fourth of the core, then 2 s at three quarters, then 2 s alone
    assert [each.exposed for each in found.transfers] == [1.0, 1.0]


def test_through_shared_memory_the_wait_computes() -> None:
    table = Table("by hand", (link(1.5, 1.5, Algorithm.SHARED),), COMPUTE)
    program = run(program_of(hidden_by(5), shared=True), [Realise(table)])
    found = simulate(program, NodeCosts(program, Rates(COMPUTE), table))
    (transfer,) = found.transfers
    assert (found.seconds, transfer.seconds, transfer.exposed) == (7.5, 1.5, 1.5)
    assert transfer.start == 6.0


def test_parts_of_a_coalesced_result_wait_for_it() -> None:
    def step(x: Any) -> Any:
        both = c10d.all_reduce_coalesced.default([x, x], "sum", GROUP)
        one = both[0]
        return WAIT(one), product(x)

    found = timeline(step, link(3.0))
    assert found.seconds == 4.0


AHEAD = {**COMPUTE, "launches": 2.0, "host runs ahead": 1.0}


def test_a_host_that_runs_ahead_hides_its_launches() -> None:
    found = timeline(lambda x: (product(x, 4),), compute=AHEAD)
    assert (found.seconds, found.compute) == (4.5, 4.0)  # the first op waits for its launch alone
    slow = timeline(lambda x: (product(x, 4),), compute={**AHEAD, "launches": 0.5})
    assert slow.seconds == 9.0  # each product is launched when the one before is long over


def test_where_the_host_computes_launches_take_time() -> None:
    found = timeline(lambda x: (product(x, 4),), compute={**COMPUTE, "launches": 2.0})
    assert (found.seconds, found.compute) == (6.0, 6.0)


def test_copies_stand_in_line_of_their_own_where_they_overlap() -> None:
    def step(x: Any) -> Any:
        there = to_device(x, torch.device("cpu"))
        a = product(x)
        b = product(there)
        host = to_host(b, False)
        c = product(a, 2)
        return wait_copy(host), c

    compute = {**COMPUTE, "host link": 8 * ROWS**2 / 1.5}
    apart = timeline(step, compute=compute, copies_overlap=True)
    assert [(each.queue, each.start, each.end, each.exposed) for each in apart.transfers] == [
        ("copy", 0.0, 1.5, 0.5),
        ("copy", 2.5, 4.0, 0.0),
    ]
    assert apart.seconds == 4.5
    assert timeline(step, compute=compute).seconds == 7.0  # in the stream that computes


def test_memory_in_use_by_the_second() -> None:
    """The operand of a collective lives until its wait."""

    def step(x: Any) -> Any:
        a = product(x)
        started = c10d.all_gather_into_tensor.default(a, 2, GROUP)
        b = product(product(x), 2)
        return aten.sum.default(WAIT(started)), aten.sum.default(b)

    found = timeline(step, link(1.0))
    matrix, number = 8 * ROWS**2, 8
    assert found.peaks == {"cpu": (1 + 1 + 2 + 2) * matrix}
    (changes,) = found.memory.values()
    x, result = matrix, 2 * matrix
    # nothing takes time but products: after the first of them a and the gathered matrix, then two more at once
    assert [size for second, size in changes if second == 0.0][-1] == x + matrix
    assert max(size for second, size in changes if second == 1.0) == x + matrix + result + matrix
    assert max(size for second, size in changes if second == 2.0) == x + matrix + result + 2 * matrix
    assert [size for _, size in changes][-2:] == [x + 2 * number, x]  # what is returned, and after the call


def test_memory_of_steps_in_turn_is_that_of_all_their_devices() -> None:
    first, second = (Timeline(1.0, 1.0, (), (), {device: ((0.5, 8),)}) for device in ("cpu", "cpu, shared"))
    found = in_turn([first, second])
    assert found is not None
    assert found.memory == {"cpu": ((0.5, 8), (1.0, 0)), "cpu, shared": ((0.0, 0), (1.5, 8))}


def test_it_is_linear_in_the_number_of_nodes() -> None:
    """20,000 nodes take under 2 s; here are a quarter of them."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for _ in range(1000):
        started = graph.call_function(c10d.all_reduce.default, (x, "sum", GROUP))
        x = graph.call_function(aten.mm.default, (x, x))
        x = graph.call_function(aten.view.default, (graph.call_function(aten.mul.Tensor, (x, 2.0)), [ROWS, ROWS]))
        x = graph.call_function(aten.add.Tensor, (x, graph.call_function(WAIT, (started,))))
    graph.output((x,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(ROWS, ROWS, dtype=torch.float64, device="meta")
    mesh = Mesh((Axis("dp", 2, GROUP, backend="gloo"),))
    program = Program.from_graph(torch.fx.GraphModule(torch.nn.Module(), graph), mesh=mesh)
    begin = time.process_time()
    costs = NodeCosts(program, Rates(COMPUTE), Table("by hand", (link(1.0),)))
    found = simulate(program, costs, with_memory=False)
    assert time.process_time() - begin < 0.6
    assert len(graph.nodes) > 5000 and found.seconds == 1000


def test_it_is_deterministic() -> None:
    assert timeline(two_starts(TP), link(3.0, 0.7)) == timeline(two_starts(TP), link(3.0, 0.7))
