"""FormIslands: what is in an island, that it lies where its ops lay, and that it writes into planned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from passes import FormIslands, Island, PassError, Phase, Program, Role, check, print_program, run
from passes.ir.collectives import is_wait
from passes.ir.inline import inlined
from passes.ir.read_program import read_program
from passes.ir.region import islands, regions
from passes.ir.saved_program import load_program, save_program
from passes.runtime.arena import view_at

from ..programs import PLAN_MEMORY, all_reduce, assert_same_bits, before_and_after, f64, make_program

aten = torch.ops.aten


def gated() -> Program:
    """A norm, two matrix products that read it, a gate between them, and a loss of all ranks."""

    def step(x: Any, v: Any, w: Any) -> Any:
        mean = aten.mean.dim(aten.mul.Tensor(x, x), [-1], True)
        normed = aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Tensor(mean, 1e-5)))
        gate = aten.silu.default(aten.mm.default(normed, v))
        hidden = aten.mul.Tensor(gate, aten.mm.default(normed, w))
        loss = all_reduce(aten.sum.default(aten.exp.default(hidden)))
        return aten.mul.Tensor(aten.add.Tensor(loss, 1.0), 0.5), aten.mm.default(hidden, w)

    return make_program(step, roles=[Role.RESULT], x=f64(4, 8), v=f64(8, 8), w=f64(8, 8))


def rotated() -> Program:
    """What a rotary embedding does: halves are exchanged along the last dim, and a reshape copies the result."""

    def step(x: Any, w: Any, cos: Any) -> Any:
        heads = aten.transpose.int(aten.view.default(aten.mm.default(x, w), [2, 4, 2, 4]), 1, 2)
        first, second = aten.slice.Tensor(heads, 3, 0, 2), aten.slice.Tensor(heads, 3, 2, 4)
        turned = aten.cat.default([aten.neg.default(second), first], -1)
        added = aten.add.Tensor(aten.mul.Tensor(heads, cos), turned)
        return (aten.mm.default(aten.reshape.default(added, [16, 4]), cos),)

    return make_program(step, x=f64(8, 8), w=f64(8, 8), cos=f64(4, 4))


def divided() -> Program:
    """Quotients that are rounded down, of integers and of floats, and one of integers that is rounded towards zero."""

    def step(x: Any, n: Any) -> Any:
        bucket = aten.floor_divide.default(aten.add.Tensor(n, 1), 3)
        steps = aten.div.Tensor_mode(aten.exp.default(x), x, rounding_mode="floor")
        whole = aten.neg.default(aten.div.Tensor_mode(n, n, rounding_mode="trunc"))
        return aten.mul.Tensor(bucket, n), aten.mul.Tensor(aten.sin.default(steps), steps), whole

    return make_program(step, x=f64(4, 4), n=torch.empty(4, 4, dtype=torch.int64))


def repeated() -> Program:
    """Ops of backward that read forward's values alone, one of them a repetition, and an op of the update."""

    def step(x: Any, w: Any) -> Any:
        hidden = aten.exp.default(aten.sin.default(aten.mm.default(x, w)))
        loss = aten.mm.default(hidden, w)
        again = aten.cos.default(aten.neg.default(hidden))
        gradient = aten.mul.Tensor(aten.mm.default(loss, w), again)
        return aten.sub.Tensor(aten.mul.Tensor(w, 0.5), gradient), loss

    program = make_program(step, {0: "w"}, x=f64(4, 4), w=f64(4, 4))
    named = {node.name: node for node in program.graph.nodes}
    for names, key, value in (
        (("cos", "neg", "mm_2", "mul"), "phase", Phase.BACKWARD),
        (("cos", "neg"), "recompute_of", "sin"),
        (("mul_1", "sub"), "phase", Phase.UPDATE),
    ):
        for name in names:
            named[name].meta[key] = value
    return program


PROGRAMS = [gated, rotated, repeated]


def inside(program: Program) -> list[list[str]]:
    """The ops of each island, by name; without the copies that write results."""
    found = islands(program.graph).values()
    return [[node.name for node in island.functional().nodes if node.op == "call_function"] for island in found]


def test_a_gate(golden: Callable[[str], None]) -> None:
    _, text = before_and_after(gated(), FormIslands(), *PLAN_MEMORY)
    golden(text)


@pytest.mark.parametrize("make", PROGRAMS)
def test_the_bits_stay_the_same(make: Callable[[], Program]) -> None:
    for pipeline in ([FormIslands()], [FormIslands(min_ops=1), *PLAN_MEMORY]):
        after = run(make(), pipeline)
        assert islands(after.graph)
        assert_same_bits(make(), after)
        assert_same_bits(make(), inlined(after))


def test_an_op_moves_to_its_reader_where_that_is_the_first_one() -> None:
    """The gate's SiLU waits for the other product. Halves are joined, and the copy of a reshape."""
    assert inside(run(gated(), [FormIslands()])) == [
        ["mul", "mean", "add", "rsqrt", "mul_1"],
        ["silu", "mul_2", "exp", "sum_1"],
        ["add_1", "mul_3"],
    ]
    assert inside(run(rotated(), [FormIslands()])) == [["neg", "cat", "mul", "add", "clone"]]


def test_nothing_moves_to_another_phase_or_becomes_a_repetition_of_forward() -> None:
    """What backward computes of forward's values alone stays in backward, and the update is left as it is."""
    program = run(repeated(), [FormIslands(min_ops=1)])
    assert inside(program) == [["sin", "exp"], ["neg", "cos"], ["mul"]]
    order = [node.name for node in program.graph.nodes]
    assert order.index("mm_1") < order.index("cos") < order.index("mul") < order.index("sub")


def test_floats_are_divided_by_ops_where_the_quotient_is_rounded_down() -> None:
    """1.0 // 0.1 is 9, of which kernels make 10; and integers, where a kernel would not survive a zero."""
    assert inside(run(divided(), [FormIslands()])) == [["add", "floor_divide", "mul"], ["sin", "mul_1"]]


@pytest.mark.parametrize("make", PROGRAMS)
def test_nothing_crosses_a_start_or_a_wait_and_each_island_is_convex(make: Callable[[], Program]) -> None:
    program = run(make(), [FormIslands(min_ops=1)])
    segments = {}
    for which, each in (("before", make()), ("after", inlined(program))):
        segment, found = 0, dict[str, int]()
        for node in each.graph.nodes:
            segment += is_wait(node) or node in each.collectives()
            found[node.name] = segment
        segments[which] = found
    assert all(segments["after"][name] == segments["before"][name] for name in segments["before"])
    program.graph.lint()  # every node follows what it reads, so nothing outside lies between two ops of an island


def test_results_lie_in_planned_memory() -> None:
    """But those that are returned; and no value of the inside has memory."""
    program = run(gated(), [FormIslands(), *PLAN_MEMORY])
    outs = [each.target for node, island in islands(program.graph).items() for each in node.args[-len(island.outs) :]]
    assert outs == [view_at, view_at, view_at, aten.empty_strided.default]
    names = {node.name for node in program.graph.nodes}
    assert names.isdisjoint({"exp", "silu", "rsqrt"})
    assert all(
        island.outs and not island.functional().find_nodes(op="call_function", target=aten.copy_.default)
        for island in islands(program.graph).values()
    )


def test_those_that_are_not_chosen_stay_ops() -> None:
    asked: list[int] = []

    def every_other(found: Sequence[Island]) -> list[bool]:
        asked.append(len(found))
        return [k % 2 == 1 for k in range(len(found))]

    program = run(gated(), [FormIslands(choose=every_other), *PLAN_MEMORY])
    assert asked == [3] and inside(program) == [["silu", "mul_2", "exp", "sum_1"]]
    assert_same_bits(gated(), program)


@pytest.mark.parametrize("pipeline", [[FormIslands()], [FormIslands(), *PLAN_MEMORY]])
def test_the_text_is_read_back(pipeline: list[Any]) -> None:
    program = run(gated(), pipeline)
    text = print_program(program)
    read, count = read_program(text, program)
    assert count == 0 and print_program(read) == text
    other = load_program(save_program(program))
    assert [node.name for node in other.graph.nodes] == [node.name for node in program.graph.nodes]
    written = [region.outs for region in regions(other.graph).values() if isinstance(region, Island)]
    assert len(written) == (3 if len(pipeline) > 1 else 0) and all(written)


def test_a_write_to_anything_but_a_result_is_refused() -> None:
    program = run(gated(), [FormIslands(), *PLAN_MEMORY])
    island = next(iter(islands(program.graph).values()))
    island.nodes[0].target = aten.mul_.Tensor
    with pytest.raises(PassError, match="holds functional ops of aten alone"):
        check(program)
