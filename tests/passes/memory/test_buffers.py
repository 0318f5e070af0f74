"""The assignment of buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from passes import Program
from passes.ir.collectives import c10d
from passes.memory.buffers import Buffer, Buffers
from passes.runtime.shared_memory_collectives import shared_all_reduce

from ..programs import GROUP, f64, make_program

aten = torch.ops.aten


def assigned(program: Program) -> dict[str, list[Buffer]]:
    """The buffers of each node, by its name."""
    return {node.name: buffers for node, buffers in Buffers(program.graph).of.items()}


def only(buffers: list[Buffer]) -> Buffer:
    (buffer,) = buffers
    return buffer


def summed(function: Callable[..., Any], **inputs: Any) -> dict[str, list[Buffer]]:
    """Of a function of x whose result is summed up, and so dies within the call."""
    return assigned(make_program(lambda x: (aten.sum.default(function(x)),), **(inputs or {"x": f64(3, 3)})))


def test_a_block_lives_from_its_write_to_its_last_read() -> None:
    def step(x: Any) -> Any:
        a = aten.mm.default(x, x)  # position 1
        b = aten.mm.default(x, a)
        return aten.sum.default(b), aten.sum.default(aten.t.default(a))  # t at position 4, read at 5

    found = assigned(make_program(step, x=f64(3, 3)))
    assert [(only(found[name]).first, only(found[name]).last) for name in ("mm", "mm_1")] == [(1, 5), (2, 3)]
    assert only(found["mm"]).size == 9 * 8 and only(found["mm"]).parent is None


@pytest.mark.parametrize("function", [
    lambda x: aten.t.default(x),  # a view of an input
    lambda x: aten.native_layer_norm.default(x, [3], None, None, 1e-5)[0],  # no out variant of its own
    lambda x: aten.reshape.default(x, [9]),  # perhaps a view
    lambda x: aten.zeros.default([3]),  # a small constant is kept
])  # fmt: skip
def test_what_has_no_buffer(function: Callable[..., Any]) -> None:
    assert summed(function) == {}


def test_results_and_what_they_share_memory_with_have_none() -> None:
    def step(x: Any) -> Any:
        return aten.t.default(aten.mm.default(x, x)), aten.sum.default(aten.neg.default(x))

    assert set(assigned(make_program(step, x=f64(3, 3)))) == {"neg"}


def test_an_op_with_two_results_has_two() -> None:
    found = summed(lambda x: aten.topk.default(x, 2)[0])
    assert [buffer.val.dtype for buffer in found["topk"]] == [torch.float64, torch.int64]


@pytest.mark.parametrize("uneven", [None, "rows"])
def test_a_part_that_is_all_there_is_on_this_rank_alone_is_copied(uneven: str | None) -> None:
    """The other rank's part of a single row is empty."""

    def join(x: Any) -> Any:
        return aten.cat.default([aten.slice.Tensor(aten.mul.Tensor(x, 2), 0, 0, 1)])

    program = make_program(lambda x: (aten.sum.default(join(x)),), x=f64(1))
    (part,) = program.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    part.meta["uneven"] = uneven
    assert bool(Buffers(program.graph).members) == (uneven is None)


def test_members_of_a_concatenation_are_parts_of_it() -> None:
    def join(x: Any) -> Any:
        return aten.cat.default([aten.mul.Tensor(x, 2), x, aten.neg.default(x)])

    program = make_program(lambda x: (aten.sum.default(join(x)),), x=f64(2, 3))
    buffers = Buffers(program.graph)
    found = {node.name: only(each) for node, each in buffers.of.items()}
    whole, first, last = found["cat"], found["mul"], found["neg"]
    assert (first.parent, first.offset) == (whole, 0) and (last.parent, last.offset) == (whole, 96)
    assert whole.parent is None and whole.fixed and whole.first == 1, "it lives since its first member is computed"
    (members,) = buffers.members.values()
    assert members == [first, None, last], "an input has to be copied"


@pytest.mark.parametrize("join", [
    lambda x: aten.cat.default([aten.mul.Tensor(x, 2), aten.neg.default(x)], 1),  # by columns
    lambda x: aten.cat.default([aten.t.default(aten.mul.Tensor(x, 2)), x]),  # in another order
    lambda x: aten.cat.default([aten._to_copy.default(x, dtype=torch.float32), x]),  # another dtype
])  # fmt: skip
def test_other_members_are_blocks_of_their_own(join: Callable[..., Any]) -> None:
    assert all(only(buffers).parent is None for buffers in summed(join).values())


def test_parts_of_parts_add_up_their_offsets() -> None:
    def join(x: Any) -> Any:
        inner = aten.cat.default([aten.mul.Tensor(x, 2), aten.neg.default(x)])
        return aten.cat.default([aten.exp.default(x), inner])

    found = summed(join, x=f64(2))
    block, offset = only(found["neg"]).block()
    assert block is only(found["cat_1"]) and offset == 16 + 16


def test_a_pointwise_op_writes_over_an_operand_that_dies() -> None:
    found = summed(lambda x: aten.mul.Tensor(aten.mm.default(x, x), 2))
    assert only(found["mul"]).parent is only(found["mm"]) and only(found["mm"]).last == 3


@pytest.mark.parametrize("read", [
    lambda a: aten.mm.default(a, aten.mul.Tensor(a, 2)),  # the operand is read later
    lambda a: aten.mul.Tensor(a, aten.t.default(a)),  # and in another layout
    lambda a: aten.mul.Tensor(aten.select.int(a, 0, 0), a),  # and a part of it is broadcast
    lambda a: aten.mm.default(a, a),  # no pointwise op
])  # fmt: skip
def test_others_do_not(read: Callable[..., Any]) -> None:
    found = summed(lambda x: read(aten.mm.default(x, x)))
    assert all(only(buffers).parent is None for buffers in found.values())


def test_what_other_ranks_read_is_shared_and_written_over_by_nothing() -> None:
    def step(x: Any) -> Any:
        published = aten.cat.default([aten.exp.default(x)])
        total = c10d.wait_tensor.default(shared_all_reduce.default(published, None, "sum", GROUP))
        return aten.sum.default(aten.neg.default(total)), aten.sum.default(aten.sin.default(published))

    found = assigned(make_program(step, x=f64(4)))
    assert only(found["cat"]).shared and only(found["exp"]).block()[0].shared
    assert only(found["sin"]).parent is None, "the operand dies there, but other ranks may read it still"
    assert not only(found["shared_all_reduce"]).shared and only(found["neg"]).parent is only(found["shared_all_reduce"])


def test_what_is_reduced_in_place_lies_in_its_operand() -> None:
    def step(x: Any) -> Any:
        published = aten.cat.default([aten.exp.default(x)])
        total = c10d.wait_tensor.default(shared_all_reduce.default(published, published, "sum", GROUP))
        return aten.sum.default(aten.neg.default(total))

    found = assigned(make_program(step, x=f64(4)))
    assert only(found["shared_all_reduce"]).parent is only(found["cat"]) and only(found["cat"]).shared
    assert only(found["neg"]).parent is None, "other ranks may read the sum still"


def test_the_result_of_a_collective_through_shared_memory_is_written_at_the_wait() -> None:
    def step(x: Any) -> Any:
        started = shared_all_reduce.default(aten.cat.default([aten.exp.default(x)]), None, "sum", GROUP)
        other = aten.sum.default(aten.sin.default(x))
        return aten.sum.default(c10d.wait_tensor.default(started)), other

    found = assigned(make_program(step, x=f64(4)))
    assert only(found["shared_all_reduce"]).first == 6
