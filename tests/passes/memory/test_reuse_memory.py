"""ReuseMemory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes import Program, Report, ReuseMemory, Role, UpdateInPlace, run
from passes.ir.collectives import c10d
from passes.runtime.arena import reserve, view_at, whole

from ..programs import (
    all_gather,
    all_reduce,
    assert_same_bits,
    before_and_after,
    f64,
    make_program,
    reduce_scatter,
    targets,
)

aten = torch.ops.aten


def rewritten(program: Program) -> list[str]:
    """The ops after the pass but for views of the arena; they must leave the same bits."""
    after = run(program, [UpdateInPlace(), ReuseMemory()])
    assert_same_bits(program, after)
    return [each for each in targets(after) if "passes.runtime.arena" not in each and "function" not in each]


def offsets(program: Program) -> dict[str, int]:
    """The offset in the arena at which each node writes, after the pass."""
    after = run(program, [UpdateInPlace(), ReuseMemory()])
    found = after.graph.find_nodes(op="call_function", target=view_at)
    return {user.name: node.args[1] for node in found for user in node.users}


def arena_bytes(program: Program) -> int:
    (arena,) = run(program, [ReuseMemory()]).graph.find_nodes(op="call_function", target=reserve)
    return int(arena.args[0])


def test_reuse_memory(golden: Any) -> None:
    def step(w: Any, v: Any, x: Any) -> Any:
        h = aten.clamp_min.default(aten.mm.default(x, w), 0)
        y = aten.sigmoid.default(aten.mm.default(h, v))
        g = aten.sigmoid_backward.default(y, y)
        back = aten.mm.default(g, aten.t.default(v))
        into_v = aten.view.default(aten.mm.default(aten.t.default(h), g), [-1])
        into_w = aten.view.default(aten.mm.default(aten.t.default(x), back), [-1])
        both = all_reduce(aten.cat.default([into_v, into_w]))
        first, second = aten.split.Tensor(both, 12)[0], aten.split.Tensor(both, 12)[1]
        new_v = aten.sub.Tensor(v, aten.view.default(first, [4, 3]))
        new_w = aten.sub.Tensor(w, aten.view.default(second, [3, 4]))
        return new_w, new_v, aten.sum.default(y)

    program = make_program(step, {0: "w", 1: "v"}, [Role.GRADIENT], w=f64(3, 4), v=f64(4, 3), x=f64(5, 3))
    after, text = before_and_after(program, UpdateInPlace(), ReuseMemory())
    golden(text)
    assert_same_bits(program, after)


def test_a_product_is_written_into_the_arena_and_a_result_is_not() -> None:
    program = make_program(lambda x: (aten.mm.default(aten.mm.default(x, x), x),), x=f64(3, 3))
    assert rewritten(program) == ["mm.out", "mm.default"]


def test_what_may_share_memory_with_a_result_is_allocated() -> None:
    def step(x: Any) -> Any:
        product = aten.mm.default(x, x)
        return aten.t.default(product), aten.sum.default(aten.reshape.default(product, [-1]))

    assert "mm.default" in rewritten(make_program(step, x=f64(3, 3)))


def test_a_pointwise_op_writes_over_what_dies() -> None:
    def step(x: Any) -> Any:
        a = aten.mm.default(x, x)
        b = aten.mul.Tensor(a, 2)
        return (aten.sum.default(aten.exp.default(b)),)

    found = offsets(make_program(step, x=f64(3, 3)))
    assert found["mm"] == found["mul"] == found["exp"]


@pytest.mark.parametrize(
    "reader",
    [
        lambda a, b: aten.add.Tensor(a, b),
        lambda a, b: aten.mm.default(b, aten.t.default(a)),
        lambda a, b: aten.mul.Tensor(b, aten.select.int(a, 0, 0)),
    ],
)
def test_not_over_what_is_read_later(reader: Any) -> None:
    def step(x: Any) -> Any:
        a = aten.mm.default(x, x)
        return (aten.sum.default(reader(a, aten.mul.Tensor(a, 2))),)

    program = make_program(step, x=f64(3, 3))
    found = offsets(program)
    assert found["mm"] != found["mul"] and rewritten(program)


def test_not_over_what_is_also_read_in_another_order() -> None:
    def step(x: Any) -> Any:
        a = aten.mm.default(x, x)
        return (aten.sum.default(aten.add.Tensor(a, aten.t.default(a))),)

    program = make_program(step, x=f64(3, 3))
    found = offsets(program)
    assert found["mm"] != found["add"] and rewritten(program)


def test_members_are_computed_in_their_parts_of_a_concatenation() -> None:
    def step(x: Any, y: Any) -> Any:
        a, b = aten.mm.default(x, x), aten.mm.default(x, y)
        return (aten.sum.default(aten.cat.default([aten.view.default(a, [-1]), aten.view.default(b, [-1])])),)

    program = make_program(step, x=f64(3, 3), y=f64(3, 2))
    assert rewritten(program) == ["mm.out", "mm.out", "view.default", "view.default", "sum.default"]
    found = offsets(program)
    assert found["mm_1"] - found["mm"] == 9 * 8


def test_a_member_that_cannot_be_is_copied_there() -> None:
    def step(x: Any, y: Any) -> Any:
        a = aten.view.default(aten.mm.default(x, x), [-1])
        return (aten.sum.default(aten.cat.default([a, y, a])),)

    program = make_program(step, x=f64(3, 3), y=f64(4))
    assert rewritten(program) == ["mm.out", "view.default", "copy_.default", "copy_.default", "sum.default"]


def test_a_concatenation_of_concatenations() -> None:
    def step(x: Any) -> Any:
        rows = [aten.mul.Tensor(x, k) for k in range(1, 5)]
        pairs = [aten.cat.default(rows[:2]), aten.cat.default(rows[2:])]
        return (aten.sum.default(aten.mul.Tensor(aten.cat.default(pairs), 2)), aten.sum.default(pairs[0]))

    program = make_program(step, x=f64(2, 3))
    assert rewritten(program) == ["mul.out"] * 5 + ["sum.default"] * 2
    found = offsets(program)
    assert [found[f"mul_{k}"] - found["mul"] for k in (1, 2, 3)] == [48, 96, 144]


def test_a_concatenation_that_is_returned_stays_a_cat() -> None:
    program = make_program(lambda x: (aten.cat.default([aten.mm.default(x, x), x]),), x=f64(3, 3))
    assert rewritten(program) == ["mm.out", "cat.default"]


def test_an_all_reduce_over_what_dies_is_done_in_place() -> None:
    program = make_program(lambda x: (aten.sum.default(all_reduce(aten.mul.Tensor(x, 2))),), x=f64(3, 3))
    found = offsets(program)
    assert found["mul"] == found["all_reduce"] and rewritten(program)


def test_an_all_reduce_of_what_lives_on_is_not() -> None:
    def step(x: Any) -> Any:
        a = aten.mul.Tensor(x, 2)
        return (aten.sum.default(aten.add.Tensor(all_reduce(a), a)),)

    program = make_program(step, x=f64(3, 3))
    found = offsets(program)
    assert found["mul"] != found["all_reduce"] and rewritten(program)


def test_operand_and_result_of_a_collective_live_until_it_is_waited_for() -> None:
    def step(x: Any) -> Any:
        started = c10d.all_gather_into_tensor.default(aten.mul.Tensor(x, 2), 2, "0")
        other = aten.sum.default(aten.mm.default(aten.mul.Tensor(x, 3), x))
        return aten.sum.default(torch.ops._c10d_functional.wait_tensor.default(started)), other

    program = make_program(step, x=f64(3, 3))
    found = offsets(program)
    assert len({found["mul"], found["all_gather_into_tensor"], found["mul_1"], found["mm"]}) == 4
    assert rewritten(program)


def test_collectives_write_into_the_arena() -> None:
    def step(x: Any) -> Any:
        return (aten.sum.default(all_gather(reduce_scatter(aten.mul.Tensor(x, 2)))),)

    ops = rewritten(make_program(step, x=f64(4, 3)))
    assert ops[1].startswith("spmd_transport.reduce_scatter") and ops[3].startswith("spmd_transport.all_gather")


def test_an_arena_is_no_larger_than_what_lives_at_once() -> None:
    def step(x: Any) -> Any:
        for _ in range(20):
            x = aten.mm.default(x, x)
        return (aten.sum.default(x),)

    program = make_program(step, x=f64(16, 16))
    assert arena_bytes(program) == 2 * 16 * 16 * 8
    memory = Report.of(run(program, [ReuseMemory()])).memory["cpu"]
    assert memory.arena == memory.arena_used == 2 * 16 * 16 * 8
    assert Report.of(program).memory["cpu"].arena == 0


def test_ops_without_an_out_variant_of_their_own_stay() -> None:
    def step(x: Any) -> Any:
        normal = aten.native_layer_norm.default(aten.mul.Tensor(x, 2), [3], None, None, 1e-5)
        return (aten.sum.default(aten.mul.Tensor(normal[0], 2)),)

    ops = rewritten(make_program(step, x=f64(4, 3)))
    assert "native_layer_norm.default" in ops and ops.count("mul.out") == 2


def test_the_op_that_a_node_was_is_kept() -> None:
    program = run(make_program(lambda x: (aten.sum.default(aten.mm.default(x, x)),), x=f64(3, 3)), [ReuseMemory()])
    (product,) = [node for node in program.graph.nodes if node.target is aten.mm.out]
    assert product.meta["computes"] is aten.mm.default
    assert not program.graph.find_nodes(op="call_function", target=whole)


def test_a_second_time_nothing_is_left_to_do() -> None:
    program = make_program(lambda x: (aten.sum.default(aten.mm.default(x, x)),), x=f64(3, 3))
    once = run(program, [ReuseMemory()])
    assert targets(run(once, [ReuseMemory()])) == targets(once)
