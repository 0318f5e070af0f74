"""The cost of single nodes, by hand: FLOPs, bytes, functions like ``exp``, launches, collectives by the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import Axis, Kind, Mesh, Program, Realise, Role, Table, run
from passes.analysis.collective_algorithms import Algorithm, Link, Point
from passes.schedule.estimate import estimate
from passes.schedule.node_costs import Cost, NodeCosts
from passes.schedule.op_work import OpClass, work_of
from passes.schedule.rates import Rates, rates_of

from ..programs import GROUP, PLAN_MEMORY, all_gather, all_reduce, f64, make_program, reduce_scatter

aten = torch.ops.aten
RATES: Mapping[str, float] = {
    "matmul float32": 1e9,
    "matmul float64": 1e9,
    "memory": 1e6,
    "transcendental": 1e3,
    "launches": 10.0,
    "views": 20.0,
}


def costs_of(program: Program, rates: Mapping[str, float] = RATES, **options: Any) -> dict[str, Cost]:
    costs = NodeCosts(program, Rates(rates), **options)
    return {node.name: costs.of(node) for node in program.graph.nodes}


def cost_of(step: Any, rates: Mapping[str, float] = RATES, **inputs: torch.Tensor) -> Cost:
    """The cost of the one op of ``step``."""
    program = make_program(step, **inputs)
    (name,) = [node.name for node in program.graph.nodes if node.op == "call_function"]
    return costs_of(program, rates)[name]


def test_a_product_takes_its_flops() -> None:
    def step(x: Any, y: Any) -> Any:
        return (aten.mm.default(x, y),)

    operands = {"x": f64(100, 200), "y": f64(200, 50)}
    cost = cost_of(step, **operands)
    assert (cost.launch, cost.kind) == (0.1, OpClass.MATMUL)
    assert cost.compute == pytest.approx(8 * (20_000 + 10_000 + 2 * 5_000) * 2 / 3 / 1e6)  # slow memory
    quick = cost_of(step, {**RATES, "memory": math.inf}, **operands)
    assert quick.compute == pytest.approx(2 * 100 * 200 * 50 / 1e9)


def test_each_product_of_a_batch_takes_the_time_of_one_of_its_size() -> None:
    rates = {**RATES, "memory": math.inf, "matmul float64 16": 1e6, "matmul float64 64": 4e6}
    cost = cost_of(lambda x: (aten.bmm.default(x, x),), rates, x=f64(5, 16, 16))
    assert cost.compute == pytest.approx(5 * 2 * 16**3 / 1e6)
    cost = cost_of(lambda x: (aten.bmm.default(x, x),), rates, x=f64(5, 64, 64))
    assert cost.compute == pytest.approx(5 * 2 * 64**3 / 4e6)


def test_a_dtype_without_a_rate_takes_float32_s() -> None:
    rates = Rates({"matmul float32": 1e9, "memory": 1e6})
    assert rates.products(torch.bfloat16, 100, 100) == pytest.approx(1e-7)
    assert rates.products(torch.float64, 100, 100) == pytest.approx(2e-7)


def test_other_ops_take_the_bytes_that_they_read_and_write() -> None:
    cost = cost_of(lambda x, y: (aten.add.Tensor(x, y),), x=f64(100), y=f64(100))
    assert (cost.launch, cost.kind, cost.compute) == (0.1, OpClass.MEMORY, pytest.approx((3 + 1) * 800 * 2 / 3 / 1e6))


def test_what_is_written_over_an_operand_is_not_fetched_first() -> None:
    """A copy is what was measured: fresh memory is read, too. On a GPU it is not."""
    rates = Rates(RATES)
    assert rates.memory(1600, 800) == rates.memory(1600) == pytest.approx(1600 / 1e6)
    assert rates.memory(1600, 0) == pytest.approx(1600 * 2 / 3 / 1e6)
    assert Rates({**RATES, "host runs ahead": 1.0}).memory(1600, 0) == pytest.approx(1600 / 1e6)


def test_functions_like_exp_take_their_elements_where_that_is_longer() -> None:
    cost = cost_of(lambda x: (aten.gelu.default(x),), x=f64(100))
    assert cost == Cost(0.1, 100 / 1e3, OpClass.TRANSCENDENTAL)
    both = cost_of(lambda x, y: (aten.gelu_backward.default(x, y),), x=f64(100), y=f64(100))
    assert both.compute == 150 / 1e3
    cost = cost_of(lambda x: (aten.gelu.default(x),), {**RATES, "transcendental": 1e9}, x=f64(100))
    assert cost.compute == pytest.approx(2 * 800 / 1e6)


def test_a_lookup_reads_the_rows_that_it_returns() -> None:
    cost = cost_of(lambda w, k: (aten.embedding.default(w, k),), w=f64(10_000, 8), k=torch.empty(5, dtype=torch.int64))
    assert cost.compute == pytest.approx((3 * 5 * 8 * 8 + 5 * 8) * 2 / 3 / 1e6)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_multiplies_and_takes_exp_of_the_scores(backward: bool) -> None:
    def step(q: Any) -> Any:
        found = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
        if not backward:
            return (found[0],)
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return (op(q, q, q, q, found[0], found[1], 0.0, False)[0],)

    program = make_program(step, q=torch.empty(2, 3, 32, 16))
    name = "_scaled_dot_product_flash_attention_for_cpu" + ("_backward" if backward else "")
    work = work_of(next(node for node in program.graph.nodes if node.name == name))
    one = 2 * 32 * 32 * 16
    assert (work.kind, work.product, work.transcendental) == (OpClass.ATTENTION, one, 2 * 3 * 32 * 32)
    assert work.flops == 2 * 3 * one * (5 if backward else 2)


def test_views_are_free_where_their_memory_stays() -> None:
    def step(w: Any, x: Any) -> Any:
        a = aten.mm.default(aten.t.default(w), aten.t.default(x))
        normed = aten.native_layer_norm.default(aten.view.default(a, [4, 4]), [4], None, None, 1e-5)
        return (aten.sum.default(aten.view.default(normed[0], [16])),)

    program = make_program(step, w=f64(4, 4), x=f64(4, 4))
    program.inputs = [replace(program.inputs[0], role=Role.PARAMETER), replace(program.inputs[1], role=Role.BATCH)]
    program = run(program, PLAN_MEMORY)
    costs = costs_of(program)
    assert {name: cost.launch for name, cost in costs.items() if name in ("t", "t_1", "view", "view_1")} == {
        "t": 0.0,  # of a parameter
        "t_1": 1 / 20,  # of the batch, which is another tensor at each call
        "view": 0.0,  # of the arena
        "view_1": 1 / 20,  # of what the norm allocates
    }


def test_a_reshape_that_copies_is_no_view() -> None:
    def step(x: Any) -> Any:
        a = aten.mul.Tensor(x, 2.0)
        return aten.reshape.default(aten.t.default(a), [16]), aten.reshape.default(a, [2, 8])

    costs = costs_of(make_program(step, x=f64(4, 4)))
    assert (costs["reshape"].compute, costs["reshape_1"].compute) == (pytest.approx(2 * 128 / 1e6), 0.0)


def test_attention_of_fewer_keys_than_queries_has_no_rule_but_its_shapes() -> None:
    """Grouped queries, values wider than keys: torch's formula refuses them."""
    program = make_program(
        lambda q, k, v: (aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0],),
        q=torch.empty(2, 8, 32, 16),
        k=torch.empty(2, 8, 64, 16),
        v=torch.empty(2, 8, 64, 16),
    )
    (node,) = [node for node in program.graph.nodes if "attention" in node.name]
    key, value = node.args[1:3]
    key.meta["val"], value.meta["val"] = torch.empty(2, 2, 64, 16), torch.empty(2, 2, 64, 24)
    work = work_of(node)
    assert (work.flops, work.transcendental) == (2 * 2 * 8 * 32 * 64 * (16 + 24), 2 * 8 * 32 * 64)


def test_what_is_no_op_of_torch_has_a_cost_as_well() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Doubled()
            self.register_buffer("kept", torch.ones(4))

        def forward(self, x: Any) -> Any:
            return (self.inner(x).relu() + self.kept, x.shape[0] * 2)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module: Any, name: str) -> bool:
            return isinstance(module, Doubled)

    step = Step()
    graph_module = torch.fx.GraphModule(step, Tracer().trace(step))
    program = Program.from_graph(graph_module)
    assert {node.op for node in program.graph.nodes} >= {"call_module", "call_method", "get_attr"}
    assert sum(cost.launch for cost in costs_of(program).values()) > 0  # no shapes are known, but ops are launched


def test_a_concatenation_is_one_launch() -> None:
    assert cost_of(lambda a, b: (aten.cat.default([a, b]),), a=f64(2), b=f64(3)).launch == 0.1


def test_an_op_over_lists_launches_for_each_tensor() -> None:
    def step(a: Any, b: Any) -> Any:
        found = aten._foreach_mul.Scalar([a, b], 2.0)
        return found[0], found[1]

    cost = costs_of(make_program(step, a=f64(10), b=f64(30)))["_foreach_mul"]
    assert (cost.launch, cost.compute) == (0.2, pytest.approx(2 * 40 * 8 / 1e6))


def test_a_fused_update_reads_gradients_and_writes_the_rest() -> None:

    shapes = {name: torch.empty(100) for name in "pgmv"}
    program = make_program(lambda p, g, m, v, s: (p,), **shapes, s=torch.empty(()))
    with program.graph.inserting_before(program.output_node):
        p, g, m, v, s = program.placeholders
        args = ([p], [g], [m], [v], [], [s])
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
        node = program.graph.call_function(
            aten._fused_adamw_.default, args, {"amsgrad": False, "maximize": False, **options}
        )
    assert (work_of(node).bytes, work_of(node).fresh) == ((4 + 3) * 400 + 4, 0)


def test_what_was_measured_of_a_node_counts() -> None:
    program = make_program(lambda x: (aten.exp.default(x),), x=f64(100))
    assert costs_of(program, measured={"exp": 0.25})["exp"] == Cost(0.0, 0.25, OpClass.TRANSCENDENTAL)


def table(**seconds: float) -> Table:
    """Points at 0 and 1,600 bytes for each algorithm: no time, and so much."""
    curves = {
        (kind, Algorithm(name)): (Point(0, 0.0, 0.0), Point(1600, each, each / 2))
        for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
        for name, each in seconds.items()
    }
    return Table("by hand", (Link("gloo", "dp", 2, curves),))


def transfers(step: Any, costs: Table, *passes: Any, **axis: Any) -> list[tuple[float, float, bool]]:
    program = make_program(step, x=f64(100))
    program.mesh = Mesh((Axis("dp", 2, GROUP, backend="gloo", **axis),))
    found = costs_of(run(program, passes), table=costs).values()
    return [(t.seconds, t.cpu, t.at_wait) for cost in found if (t := cost.transfer)]


def test_collectives_take_what_was_measured_of_their_kind_and_size() -> None:
    def step(x: Any) -> Any:
        return all_reduce(x), all_gather(x), reduce_scatter(x)

    # an all_reduce and a reduce_scatter of 800 bytes, an all_gather to 1,600
    assert transfers(step, table(native=4.0)) == [(2.0, 1.0, False), (4.0, 2.0, False), (2.0, 1.0, False)]


@pytest.mark.parametrize(("algorithm", "shared"), [("exchange", False), ("shared", True)])
def test_the_algorithm_that_performs_it_is_what_counts(algorithm: str, shared: bool) -> None:
    costs = table(native=4.0, **{algorithm: 1.0})
    found = transfers(lambda x: (reduce_scatter(x),), costs, Realise(costs), shared=shared)
    assert found == [(0.5, 0.25, shared)]


def test_what_was_not_measured_takes_the_latency_and_the_bytes_of_its_axis() -> None:
    (found,) = transfers(lambda x: (all_reduce(x),), Table("empty", ()))
    assert found[0] == pytest.approx(2.0**-14 + 800 * 2.0**-30)


def test_a_fake_group_stands_for_what_the_table_describes() -> None:
    program = make_program(lambda x: (all_reduce(x),), x=f64(100))
    program.mesh = Mesh((Axis("dp", 2, GROUP, backend="fake"),))
    found = estimate(program, table(native=4.0))
    assert found is not None and found.communication == 2.0


def test_rates_of_a_table_replace_those_that_are_built_in() -> None:
    cpu = torch.device("cpu")
    built_in = rates_of(Table("", ()), cpu, Mesh())
    assert built_in is not None and built_in.products(torch.float32, 10**9, 10**9) > 0
    measured = rates_of(Table("", (), {"matmul float32": 1e6, "memory": 1e6}), cpu, Mesh())  # as it was until 2026-11
    assert measured is not None
    assert measured.products(torch.float32, 2000, 1000) == 2e-3  # small products, too
    assert measured.launch == built_in.launch


def test_between_two_sizes_time_runs_along_a_line() -> None:
    rates = Rates({"memory 100": 200.0, "memory 300": 200.0, "memory": 1e9, "matmul float32": 1.0})
    assert [rates.memory(size) for size in (100, 200, 400, 600)] == [0.5, 1.0, 2.0, 3.0]


def test_a_device_of_which_nothing_is_known_has_no_estimate() -> None:
    assert rates_of(Table("", ()), torch.device("xpu"), Mesh()) is None
