"""Realise on NCCL: the members of a bucket are sent in one launch, without copies."""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from passes import (
    Axis,
    Kind,
    Mesh,
    Program,
    Realise,
    Report,
    ReuseMemory,
    Role,
    StartEarly,
    Table,
    UpdateInPlace,
    WaitLate,
    run,
)
from passes.analysis.collective_algorithms import MEASURED_MEMBERS, Algorithm, Link, Point
from passes.ir.collectives import WAIT
from passes.runtime import coalesced_collectives
from passes.runtime.arena import reserve, view_at
from tests.harness.pool import Ranks

from ..programs import (
    GROUP,
    PLAN_MEMORY,
    all_gather,
    assert_same_bits,
    before_and_after,
    f64,
    make_program,
    reduce_scatter,
    targets,
)
from . import test_realise_shared_memory
from .test_realise_shared_memory import BUCKETS

aten = torch.ops.aten

AXIS = Axis("dp", 2, GROUP, 0, "nccl")


def measured(native: float, coalesced: float) -> Table:
    """Seconds for a message, and for a launch of eight; copies take a second for each byte read or written."""
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    curves = {(kind, Algorithm.NATIVE): (Point(1 << 30, native, 0.0),) for kind in kinds}
    curves |= {(kind, Algorithm.COALESCED): (Point(1 << 30, coalesced, 0.0),) for kind in kinds}
    return Table("measured", (Link("nccl", "dp", 2, curves),), {"memory": 1.0})


CHEAP = Realise(measured(0.0, 0.0))


def program() -> Program:
    return replace(test_realise_shared_memory.program(), mesh=Mesh((AXIS,)))


def test_coalesced(golden: Any) -> None:
    bucketed = run(program(), BUCKETS)
    after, text = before_and_after(bucketed, CHEAP)
    golden(text)
    assert_same_bits(program(), after)


def test_the_whole_pipeline_gives_the_same_bits() -> None:
    after = run(program(), [*BUCKETS, CHEAP, StartEarly(), WaitLate(), UpdateInPlace(), *PLAN_MEMORY])
    names = [node.target._schema.name.split("::")[1] for node in after.collectives()]
    assert sorted(names) == ["all_reduce", "coalesced_all_gather", "coalesced_reduce_scatter"]
    assert_same_bits(program(), after)


def test_it_is_counted_by_its_semantics() -> None:
    before, after = Report.of(run(program(), BUCKETS)), Report.of(run(program(), [*BUCKETS, CHEAP]))
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        assert (after.count(kind), after.bytes(kind)) == (before.count(kind), before.bytes(kind))


def test_gradients_are_computed_in_the_operand_and_nothing_is_copied() -> None:
    after = run(program(), [*BUCKETS, CHEAP, ReuseMemory()])
    (scatter,) = [node for node in after.collectives() if "reduce_scatter" in str(node.target)]
    (operand, *_) = scatter.args
    assert isinstance(operand, torch.fx.Node)
    (arena,) = after.graph.find_nodes(op="call_function", target=reserve)
    written = [user for node in arena.users if node.target is view_at for user in node.users]
    assert [str(node.target) for node in written].count("aten.mm.out") >= 2
    after_gradients = [node for node in after.graph.nodes if node in operand.all_input_nodes]
    assert not any(node.target is aten.copy_.default for node in after_gradients)
    assert not any("split_with_sizes_copy" in target for target in targets(after))


@pytest.mark.parametrize("table", [Table("none", ()), measured(0.0, 1e9)])
def test_small_members_are_packed(table: Table) -> None:
    bucketed = run(program(), BUCKETS)
    assert targets(run(bucketed, [Realise(table)])) == targets(bucketed)


def test_a_collective_without_a_bucket_keeps_its_op() -> None:
    assert targets(run(program(), [CHEAP])) == targets(program())


def test_fake_ranks_show_what_nccl_would_do() -> None:
    elsewhere = replace(run(program(), BUCKETS), mesh=Mesh((replace(AXIS, backend="fake"),)))
    assert targets(run(elsewhere, [CHEAP])) == targets(elsewhere)
    shown = run(elsewhere, [replace(CHEAP, backend="nccl")])
    assert targets(shown) == targets(run(replace(elsewhere, mesh=Mesh((AXIS,))), [CHEAP]))


def test_a_member_without_elements() -> None:
    def two(w: Any, v: Any) -> Any:
        return reduce_scatter(all_gather(w)), reduce_scatter(all_gather(v))

    before = make_program(two, {}, [Role.PARAMETER, Role.PARAMETER, Role.GRADIENT, Role.GRADIENT], w=f64(0), v=f64(3))
    before.mesh = Mesh((AXIS,))
    assert_same_bits(before, run(before, [*BUCKETS, CHEAP, ReuseMemory()]))


def test_a_split_of_the_user_is_not_taken_for_a_bucket() -> None:
    def step(w: Any) -> Any:
        rows = aten.view.default(all_gather(w), [4, 6])  # of two ranks
        parts = aten.split_with_sizes_copy.default(rows, [2, 4], 1)
        return operator.getitem(parts, 0), operator.getitem(parts, 1)

    before = replace(make_program(step, {}, [Role.PARAMETER], w=f64(12)), mesh=Mesh((AXIS,)))
    assert targets(run(before, [CHEAP])) == targets(before)


# The ops, on gloo, which can do the same

DTYPES = (torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.bool)
LENGTHS = ([3], [2, 0, 5], [0], [0, 0], [1001, 1])


def mine(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """The operands of one rank."""
    return (torch.arange(length) * 7 + rank * 3).remainder(5).to(dtype)


def wrongly_moved(rank: int, world: int) -> list[str]:
    """Differences from the results of the backend's own op on each member."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    wrong = []
    for dtype, lengths in product(DTYPES, LENGTHS):
        total = sum(lengths)
        each = [mine(r, total, dtype).split(lengths) for r in range(world)]
        whole = torch.cat([part for parts in zip(*each, strict=True) for part in parts])
        wrong += _both(
            coalesced_collectives.coalesced_all_gather, whole, mine(rank, total, dtype), lengths, world, group
        )
        if dtype.is_floating_point or dtype.is_complex:
            x = sum(mine(r, world * total, dtype) for r in range(world))
            assert isinstance(x, Tensor)
            own = torch.cat([member.chunk(world)[rank] if len(member) else member for member in _members(x, lengths)])
            op = coalesced_collectives.coalesced_reduce_scatter
            wrong += _both(op, own, mine(rank, world * total, dtype), "sum", lengths, world, group)
    return wrong


def _members(x: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    return x.split([len(x) // max(sum(lengths), 1) * length for length in lengths])


def _both(op: Any, expected: Tensor, *args: Any) -> list[str]:
    """Errors of the functional op and of its out variant."""
    out = torch.empty_like(expected)
    got = {"out": WAIT(op.out(*args, out=out)), "new": WAIT(op(*args))}
    assert got["out"].data_ptr() == out.data_ptr()
    return [f"{op} ({k}): {each}, not {expected}" for k, each in got.items() if not torch.equal(each, expected)]


@pytest.mark.parametrize("world", [2, 3])
def test_members_reach_their_ranks(ranks: Ranks, world: int) -> None:
    assert [line for lines in ranks.run(world, wrongly_moved) for line in lines] == []


def test_measurements_decide_or_else_the_size() -> None:
    """Of two members, 400 bytes in all: 800 are read and written by a copy."""
    curves = {
        (Kind.ALL_GATHER, Algorithm.NATIVE): (Point(100, 10.0, 0.0), Point(1000, 100.0, 0.0)),  # 40 for both
        (Kind.ALL_GATHER, Algorithm.COALESCED): (Point(200 * MEASURED_MEMBERS, 320.0, 0.0),),  # 80 for both
    }
    link = Link("nccl", "dp", 2, curves)

    def coalesces(rate: float, size: int, members: int, kind: Kind = Kind.ALL_GATHER) -> bool:
        return Table("", (link,), {"memory": rate}).coalesces(AXIS, "nccl", kind, size, members)

    assert coalesces(800 / 41, 400, 2) and not coalesces(800 / 39, 400, 2)
    assert coalesces(1.0, 1 << 21, 2, Kind.REDUCE_SCATTER)
    assert not coalesces(1.0, (1 << 21) - 4, 2, Kind.REDUCE_SCATTER)
    assert Table("", ()).coalesces(AXIS, "nccl", Kind.ALL_GATHER, 1 << 21, 2)


def test_all_ranks_decide_by_the_largest_size() -> None:
    bucketed = run(program(), BUCKETS)
    for node in bucketed.collectives():
        node.meta["most_bytes"] = 1 << 22
    assert targets(run(bucketed, [Realise(Table("none", ()))])) == targets(run(bucketed, [CHEAP]))
