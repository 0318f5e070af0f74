"""Realise where the ranks of an axis are on one host: collectives go through shared memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from passes import (
    Axis,
    BucketAllGather,
    BucketAllReduce,
    BucketReduceScatter,
    Canonicalize,
    MergeEqual,
    Mesh,
    Pass,
    Program,
    Realise,
    Report,
    ReuseMemory,
    Role,
    StartEarly,
    UpdateInPlace,
    WaitLate,
    run,
)
from passes.analysis.collective_algorithms import Algorithm
from passes.ir.collectives import is_shared, operands
from passes.memory.offsets import aligned
from passes.runtime.arena import reserve, view_at

from ..programs import (
    GROUP,
    PLAN_MEMORY,
    all_gather,
    all_reduce,
    assert_same_bits,
    before_and_after,
    f64,
    make_program,
    reduce_scatter,
    targets,
)
from .test_realise import only

aten = torch.ops.aten

ROLES = [Role.PARAMETER, Role.PARAMETER, Role.GRADIENT, Role.GRADIENT, Role.GRADIENT]
SHARED = Realise(only(Algorithm.SHARED, Algorithm.NATIVE))
BUCKETS: tuple[Pass, ...] = (BucketAllGather(), BucketReduceScatter(), BucketAllReduce())


def on_one_host(program: Program, shared: bool = True) -> Program:
    return replace(program.copy(), mesh=Mesh((Axis("dp", 2, GROUP, 0, "gloo", shared),)))


def step(w: Any, v: Any, b: Any, x: Any) -> Any:
    """Two split parameters, a whole one, and updates of all."""
    h = aten.mm.default(x, all_gather(w))
    y = aten.add.Tensor(aten.mm.default(h, all_gather(v)), b)
    grad_v = reduce_scatter(aten.mm.default(aten.t.default(h), y))
    grad_w = reduce_scatter(aten.mm.default(aten.t.default(x), h))
    grad_b = all_reduce(aten.sum.dim_IntList(y, [0]))
    return aten.sub.Tensor(w, grad_w), aten.sub.Tensor(v, grad_v), aten.sub.Tensor(b, grad_b)


def program() -> Program:
    updates = {0: "w", 1: "v", 2: "b"}
    return on_one_host(make_program(step, updates, ROLES, w=f64(2, 4), v=f64(2, 6), b=f64(6), x=f64(3, 4)))


def test_shared_memory(golden: Any) -> None:
    bucketed = run(program(), BUCKETS)
    after, text = before_and_after(bucketed, SHARED)
    golden(text)
    assert_same_bits(program(), after)


@pytest.mark.parametrize("buckets", [(), BUCKETS])
def test_the_whole_pipeline_gives_the_same_bits(buckets: tuple[Pass, ...]) -> None:
    after = run(program(), [*buckets, SHARED, StartEarly(), WaitLate(), UpdateInPlace(), *PLAN_MEMORY])
    assert all(map(is_shared, after.collectives()))
    assert_same_bits(program(), after)


@pytest.mark.parametrize("buckets", [(), BUCKETS])
def test_it_is_counted_by_its_semantics(buckets: tuple[Pass, ...]) -> None:
    before, after = Report.of(run(program(), buckets)), Report.of(run(program(), [*buckets, SHARED]))
    for kind in ("all_gather", "all_reduce", "reduce_scatter"):
        assert (after.count(kind), after.bytes(kind)) == (before.count(kind), before.bytes(kind))


def test_a_bucket_is_neither_packed_nor_unpacked() -> None:
    packed = run(program(), BUCKETS)
    assert any("split_with_sizes_copy" in target for target in targets(packed))
    after = run(program(), [*BUCKETS, SHARED])
    assert not any("split_with_sizes_copy" in target for target in targets(after))
    assert all(node.args[1:] != (1,) for node in after.graph.find_nodes(op="call_function", target=aten.cat.default))


def test_gradients_are_computed_in_shared_memory() -> None:
    after = run(program(), [*BUCKETS, SHARED, Canonicalize(), ReuseMemory()])
    (shared,) = [
        node for node in after.graph.find_nodes(op="call_function", target=reserve) if node.args[2:] == (True,)
    ]
    written = [user for node in shared.users if node.target is view_at for user in node.users]
    assert {"mm.out", "sum.IntList_out"} <= {str(user.target).removeprefix("aten.") for user in written}


def test_what_lives_before_gradients_lies_in_their_memory() -> None:
    """Shared memory is free until the first gradient is published, and large values of forward lie there until then."""

    def step(x: Any) -> Any:
        hidden = aten.sin.default(x)
        return (all_reduce(aten.mm.default(aten.exp.default(aten.mm.default(hidden, hidden)), x)),)

    before = on_one_host(make_program(step, {}, [Role.GRADIENT], x=f64(64, 64)))
    after = run(before, [SHARED, Canonicalize(), ReuseMemory()])
    private, shared = after.graph.find_nodes(op="call_function", target=reserve)
    assert shared.args[2:] == (True,) and [shared.args[0], private.args[0]] == [64 * 64 * 8] * 2
    assert_same_bits(before, after)


def test_small_values_stay_out_of_shared_memory() -> None:
    def chained(x: Any) -> Any:
        grown = aten.exp.default(x)
        total = all_reduce(aten.sin.default(grown))
        return (aten.add.Tensor(aten.neg.default(total), aten.cos.default(grown)),)

    before = on_one_host(make_program(chained, {}, [Role.RESULT], x=f64(4)))
    after = run(before, [SHARED, StartEarly(), WaitLate(), ReuseMemory()])
    (started,) = after.collectives()
    assert is_shared(started)
    (where,) = [node for node in after.graph.find_nodes(op="call_function", target=reserve) if node.args[2:]]
    assert len({node.args[1] for node in where.users}) == 1  # one block
    assert operands(started)[0].meta["val"].shape == (4,)
    assert_same_bits(before, after)


def test_ranks_that_are_not_on_one_host_keep_the_backend() -> None:
    apart = on_one_host(program(), shared=False)
    assert targets(run(apart, [SHARED])) == targets(apart)


@pytest.mark.parametrize("reduction", ["sum", "max"])
def test_whole_numbers_and_other_reductions(reduction: str) -> None:
    def reduce(x: Any) -> Any:
        return (all_reduce(x, reduction),)

    before = on_one_host(make_program(reduce, {}, [Role.RESULT], x=torch.zeros(4, 2, dtype=torch.int32)))
    after = run(before, [SHARED])
    assert "spmd_transport.shared_all_reduce.default" in targets(after)
    assert_same_bits(before, after)


@pytest.mark.parametrize("rows, scratch", [(512, 0), (513, 1)])
def test_many_ranks_reduce_a_part_each_where_that_reads_less(rows: int, scratch: int) -> None:
    program = make_program(lambda x: (all_reduce(x),), {}, [Role.GRADIENT], x=f64(rows, 4))
    program.mesh = Mesh((Axis("dp", 4, GROUP, 1, "gloo", True),))
    after = run(program, [SHARED, ReuseMemory()])
    (started,) = after.collectives()
    tensors = [node for node in started.args if isinstance(node, torch.fx.Node)]
    assert len(tensors) == 1 + scratch
    arenas = [node for node in after.graph.find_nodes(op="call_function", target=reserve) if node.args[2:]]
    assert arenas[0].args[0] == aligned(rows * 4 * 8) + scratch * aligned(rows * 8)


def test_each_all_reduce_has_its_own_scratch() -> None:
    program = make_program(lambda x: (all_reduce(x), all_reduce(x, "max")), {}, [Role.RESULT], x=f64(513, 4))
    program.mesh = Mesh((Axis("dp", 4, GROUP, 1, "gloo", True),))
    one, other = run(program, [SHARED, MergeEqual(), ReuseMemory()]).collectives()
    assert one.args[0] == other.args[0] and one.args[1] != other.args[1]
