"""Wrong passes, of the classes of published bugs in parallel trainers, each at a place of its own.

A mutant that stands first edits the partitioned program; others stand behind a pass of the default pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes import (
    BucketAllGather,
    BucketAllReduce,
    BucketReduceScatter,
    FuseUpdate,
    Kind,
    OutputKind,
    Pass,
    Program,
    Realise,
    ReuseMemory,
    Role,
    UpdateInPlace,
    WaitLate,
)
from passes.ir.collectives import is_collective, is_wait, kind_of, operands
from passes.runtime.arena import view_at
from passes.runtime.random import draw
from tests.spmd.verification.prepared import Edit

aten = torch.ops.aten
Case = tuple[str, Edit, type[Pass] | None]


def collectives(program: Program, kind: Kind) -> list[fx.Node]:
    return [node for node in program.collectives() if kind_of(node) is kind]


def wait_of(start: fx.Node) -> fx.Node:
    return next(user for user in start.users if is_wait(user))


def rank_of(program: Program) -> int:
    return program.mesh.axes[-1].coordinate


def instead(node: fx.Node, make: Callable[[fx.Graph], fx.Node]) -> int:
    """Let all readers of ``node`` read what ``make`` adds behind it."""
    with node.graph.inserting_after(node):
        new = make(node.graph)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    new.meta.setdefault("val", node.meta.get("val"))
    return 1


def after(node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> int:
    return instead(node, lambda graph: graph.call_function(target, (node, *args), kwargs))


def with_argument(node: fx.Node, position: int, value: Any) -> int:
    node.args = (*node.args[:position], value, *node.args[position + 1 :])
    return 1


def dropped(kind: Kind, which: int) -> Edit:
    """No communication: what the rank has is taken for what all have."""

    def edit(program: Program) -> int:
        start = collectives(program, kind)[which]
        end, (own,) = wait_of(start), operands(start)
        shape = list(end.meta["val"].shape)
        if kind is Kind.ALL_REDUCE:
            end.replace_all_uses_with(own)
        elif kind is Kind.REDUCE_SCATTER:  # the own part, of one rank's sum
            rows = shape[0]
            instead(end, lambda g: g.call_function(aten.narrow.default, (own, 0, rank_of(program) * rows, rows)))
        else:
            times = [shape[0] // own.meta["val"].shape[0], *[1] * (len(shape) - 1)]
            instead(end, lambda g: g.call_function(aten.repeat.default, (own, times)))
        return 1

    return edit


def reduced_by(kind: Kind, reduction: str, which: int = 0) -> Edit:
    return lambda program: with_argument(collectives(program, kind)[which], 1, reduction)


def scaled(kind: Kind, by: float, which: int = 0) -> Edit:
    return lambda program: after(wait_of(collectives(program, kind)[which]), aten.mul.Tensor, by)


def rotated(kind: Kind, which: int = 0, dim: int = 0) -> Edit:
    """The parts of the ranks in another order."""

    def edit(program: Program) -> int:
        end = wait_of(collectives(program, kind)[which])
        rows = end.meta["val"].shape[0] // program.mesh.axes[-1].size
        return after(end, aten.roll.default, [rows], [dim])

    return edit


def scattered_to_others(program: Program) -> int:
    start = collectives(program, Kind.REDUCE_SCATTER)[0]
    (whole,) = operands(start)
    return after(whole, aten.roll.default, [whole.meta["val"].shape[0] // 2], [0])


def over_the_other_axis(program: Program) -> int:
    """The group of another axis of the same size."""
    one, other = program.mesh.axes
    start = next(node for node in program.collectives() if node.args[-1] == other.group)
    return with_argument(start, len(start.args) - 1, one.group)


def without_wait(which: int, kind: Kind = Kind.ALL_REDUCE) -> Edit:
    def edit(program: Program) -> int:
        start = collectives(program, kind)[which]
        end = wait_of(start)
        end.replace_all_uses_with(start)
        program.graph.erase_node(end)
        return 1

    return edit


def updates(program: Program) -> list[tuple[int, str]]:
    return [(k, out.name) for k, out in enumerate(program.outputs) if out.kind is OutputKind.UPDATE]


def returns(program: Program, position: int, value: Any) -> int:
    values = list(program.output_values())
    values[position] = value
    program.output_node.args = (tuple(values),)
    return 1


def lost_update(of: str) -> Edit:
    """New state is dropped, and the old stays."""

    def edit(program: Program) -> int:
        position, name = next((k, name) for k, name in updates(program) if name.startswith(of))
        return returns(program, position, program.placeholders[program.positions()[name]])

    return edit


def swapped_updates(one: str, other: str) -> Edit:
    def edit(program: Program) -> int:
        at = {name: k for k, name in updates(program)}
        values = program.output_values()
        first, second = values[at[one]], values[at[other]]
        return returns(program, at[one], second) and returns(program, at[other], first)

    return edit


def stale_number(name: str, value: float) -> Edit:
    """A hyper-parameter is the constant that it was when the step was traced."""

    def edit(program: Program) -> int:
        node = program.placeholders[program.positions()[name]]
        for user in list(node.users):
            user.args, user.kwargs = fx.node.map_arg(
                (user.args, user.kwargs), lambda arg: value if arg is node else arg
            )
        return 1

    return edit


def calls(program: Program, target: Any) -> list[fx.Node]:
    return list(program.graph.find_nodes(op="call_function", target=target))


def rounded(which: int) -> Edit:
    """A gradient passes through a bucket of a narrower dtype."""

    def edit(program: Program) -> int:
        (own,) = operands(collectives(program, Kind.ALL_REDUCE)[which])
        return after(own, aten._to_copy.default, dtype=torch.float32) and after(
            next(iter(own.users)), aten._to_copy.default, dtype=torch.float64
        )

    return edit


def on_one_rank(edit: Edit, rank: int = 1) -> Edit:
    """Only one rank is wrong: all others have the same node, which changes nothing."""
    return lambda program: edit(program) if rank_of(program) == rank else _unchanged(program, edit)


def _unchanged(program: Program, edit: Edit) -> int:
    before = len(program.graph.nodes)
    edit(program)
    made = [node for node in program.graph.nodes if node.target is aten.mul.Tensor and node.args[1] == ONLY_HERE]
    for node in made:
        with_argument(node, 1, 1.0)
    assert len(program.graph.nodes) >= before
    return 1


ONLY_HERE = 1.25


def swapped_pieces(target: Any, after_wait: bool = True) -> Edit:
    """Two members of a bucket, of one size, change places."""

    def edit(program: Program) -> int:
        for split in calls(program, target) + calls(program, aten.split_with_sizes_copy.default):
            pieces = {node.args[1]: node for node in split.users if node.target is getitem}
            sizes = split.args[1]
            for one in pieces:
                for other in pieces:
                    if one < other and sizes[one] == sizes[other]:
                        pieces[one].args, pieces[other].args = (split, other), (split, one)
                        return 1
        return 0

    return edit


def packed_in_another_order(program: Program) -> int:
    """One rank packs the members of a bucket as another does not."""
    node = next(each for each in calls(program, aten.cat.default) if len(each.args[0]) > 1)
    return with_argument(node, 0, list(reversed(node.args[0])) if rank_of(program) else node.args[0])


def one_region(program: Program) -> int:
    """All ranks draw what the first draws."""
    for node in calls(program, draw):
        regions = tuple((0, length, size) for _, length, size in node.args[3])
        with_argument(node, 3, regions)
    return len(calls(program, draw))


def another_draw(program: Program) -> int:
    """The recomputed draw differs from the first."""
    return with_argument(calls(program, draw)[-1], 2, 77)


def memory_in_use(which: int) -> Edit:
    """A value is put where another lies that is read later."""

    def edit(program: Program) -> int:
        order = {node: k for k, node in enumerate(program.graph.nodes)}
        views = [node for node in calls(program, view_at) if node.args[4] is torch.float64]
        found = 0
        for one in views:
            writer = min(one.users, key=order.__getitem__, default=None)
            readers = [order[reader] for user in one.users for reader in user.users]
            if writer is None or not readers or is_collective(writer):
                continue
            for other in views:
                written = min((order[user] for user in other.users), default=0)
                same = one.args[0] is other.args[0] and other.args[1] != one.args[1]
                if same and order[writer] < written < max(readers) and _bytes(other) >= _bytes(one):
                    if found == which:
                        return with_argument(other, 1, one.args[1])
                    found += 1
        return 0

    return edit


def _bytes(view: fx.Node) -> int:
    return int(torch.Size(view.args[2]).numel())


def overwritten_while_read(program: Program) -> int:
    """A rank writes to what it publishes as soon as it has read what it needs itself."""
    start = next(node for node in program.collectives() if "shared" in str(node.target) and operands(node))
    (own,) = operands(start)
    with program.graph.inserting_after(wait_of(start)):
        program.graph.call_function(aten.zero_.default, (own,))
    return 1


def operand_written_early(program: Program) -> int:
    """The operand of a collective is overwritten before the wait."""
    start = next(node for node in program.collectives() if kind_of(node) is not Kind.ALL_REDUCE)
    (own,) = operands(start)
    with program.graph.inserting_after(start):
        program.graph.call_function(aten.mul_.Tensor, (own, 2.0))
    return 1


def updated_before_last_read(program: Program) -> int:
    """The first op that writes a parameter comes before forward reads it."""
    pairs = zip(program.placeholders, program.inputs, strict=True)
    weight = next(node for node, each in pairs if each.role is Role.PARAMETER)
    first = next(node for node in program.graph.nodes if node.op == "call_function")
    with program.graph.inserting_before(first):
        program.graph.call_function(aten.mul_.Tensor, (weight, 0.5))
    return 1


def other_eps(program: Program) -> int:
    node = calls(program, aten.native_layer_norm.default)[0]
    return with_argument(node, 4, 1e-2)


def local_count(program: Program) -> int:
    """The mean is over this rank's targets, times the ranks: right for equal counts only."""
    for start in collectives(program, Kind.ALL_REDUCE):
        (own,) = operands(start)
        source = own
        while source.all_input_nodes and source.target not in (aten.sum.default, aten.sum.dim_IntList):
            source = source.all_input_nodes[0]
        if any(not node.meta["val"].is_floating_point() for node in source.all_input_nodes):
            end = wait_of(start)
            return instead(end, lambda g: g.call_function(aten.mul.Tensor, (own, 2)))  # noqa: B023
    return 0


def wrong_gradient(target: Any, *args: Any) -> Edit:
    return lambda program: after(wait_of(collectives(program, Kind.ALL_REDUCE)[2]), target, *args)


def twice(program: Program) -> int:
    """A gradient is accumulated a second time."""
    end = wait_of(collectives(program, Kind.ALL_REDUCE)[2])
    return instead(end, lambda graph: graph.call_function(aten.add.Tensor, (end, end)))


def one_row_off(program: Program) -> int:
    """Ranks take their parts of a value one row too early or too late."""
    for node in calls(program, aten.slice.Tensor):
        whole, (start, end) = node.args[0].meta["val"].shape[node.args[1]], node.args[2:4]
        if end - start < whole:
            step = -1 if start else 1
            return with_argument(node, 2, start + step) and with_argument(node, 3, end + step)
    return 0


REDUCE, GATHER, SCATTER = Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER
UP, NORM, BIAS = "model.up.weight", "model.norm.weight", "model.norm.bias"

PUBLISHED: dict[str, Case] = {
    **{f"reduction {k} is dropped": ("replicate", dropped(REDUCE, k), None) for k in (0, 2, 4, 7)},
    **{f"reduction {k} is dropped, beside a tensor axis": ("tensor", dropped(REDUCE, k), None) for k in (1, 3, 5)},
    **{f"reduction of shards {k} is dropped": ("fully_shard", dropped(SCATTER, k), None) for k in range(3)},
    **{f"reduction over replicas {k} is dropped": ("hybrid", dropped(REDUCE, k), None) for k in (1, 2)},
    **{f"gather {k} is dropped": ("fully_shard", dropped(GATHER, k), None) for k in range(3)},
    "gather after an update is dropped": ("zero", dropped(GATHER, -1), None),
    "gather along a tensor axis is dropped": ("tensor", dropped(GATHER, 0), None),
    "mean for sum": ("replicate", reduced_by(REDUCE, "avg", 2), None),
    "max for sum": ("replicate", reduced_by(REDUCE, "max", 2), None),
    "mean for sum of shards": ("fully_shard", reduced_by(SCATTER, "avg"), None),
    "sum for mean": ("replicate", scaled(REDUCE, 2.0, -1), None),
    "divided by the world twice": ("replicate", scaled(REDUCE, 0.5, 2), None),
    "a mean over unequal counts": ("replicate", local_count, None),
    "parts gathered in the wrong order": ("fully_shard", rotated(GATHER), None),
    "tensor parts gathered in the wrong order": ("tensor", rotated(GATHER), None),
    "parts scattered to other ranks": ("fully_shard", scattered_to_others, None),
    "over the wrong axis": ("hybrid", over_the_other_axis, None),
    "over the wrong tensor axis": ("tensor", over_the_other_axis, None),
    "no wait for a gradient": ("replicate", without_wait(2), None),
    "no wait for the loss": ("replicate", without_wait(-1), None),
    "no wait for a parameter": ("fully_shard", without_wait(0, GATHER), None),
    "an update is lost": ("replicate", lost_update(UP), None),
    "a moment is stale": ("replicate", lost_update("optimizer.exp_avg["), None),
    "the step count is stale": ("fully_shard", lost_update("optimizer.step["), None),
    "updates change places": ("replicate", swapped_updates(NORM, BIAS), None),
    "a stale learning rate": ("replicate", stale_number("optimizer.0.lr", 0.2), None),
    "a stale epsilon": ("fully_shard", stale_number("optimizer.0.eps", 1e-3), None),
    "a gradient in a narrower dtype": ("replicate", rounded(2), None),
    "a gradient with the wrong sign": ("replicate", wrong_gradient(aten.neg.default), None),
    "a gradient counted twice": ("replicate", twice, None),
    "one rank has another gradient": ("replicate", on_one_rank(scaled(REDUCE, ONLY_HERE, 2)), None),
    "one rank has another loss": ("replicate", on_one_rank(scaled(REDUCE, ONLY_HERE, -1)), None),
    "a setting of an op is lost": ("odd", other_eps, None),
    "a part begins one row off": ("tensor", one_row_off, None),
    "equal dropout on all shards": ("dropout", one_region, None),
    "a recomputed draw differs": ("dropout", another_draw, None),
    "members of a bucket change places": (
        "fully_shard",
        swapped_pieces(aten.split_with_sizes.default),
        BucketAllGather,
    ),
    "members of a reduced bucket change places": (
        "replicate",
        swapped_pieces(aten.split_with_sizes.default),
        BucketAllReduce,
    ),
    "members of a scattered bucket change places": (
        "fully_shard",
        swapped_pieces(aten.split_with_sizes.default),
        BucketReduceScatter,
    ),
    "a rank packs in another order": ("replicate", packed_in_another_order, BucketAllReduce),
    "a bucket is not waited for": ("replicate", without_wait(0), BucketAllReduce),
    "a fused update is scaled": ("replicate", stale_number("optimizer.0.lr", 0.2), FuseUpdate),
    "a realised sum is dropped": ("replicate", dropped(REDUCE, 0), Realise),
    "a realised gather is out of order": ("hybrid", rotated(GATHER), Realise),
    "a late wait is missing": ("fully_shard", without_wait(0, SCATTER), WaitLate),
    "an update before the last read": ("replicate", updated_before_last_read, UpdateInPlace),
    "an operand is overwritten before the wait": ("fully_shard", operand_written_early, UpdateInPlace),
    "memory is reused while it is read": ("replicate", memory_in_use(0), ReuseMemory),
    "memory of a gathered value is reused": ("fully_shard", memory_in_use(0), ReuseMemory),
    "memory of a gradient is stolen": ("zero", memory_in_use(1), ReuseMemory),
    "published memory is overwritten": ("fully_shard", overwritten_while_read, ReuseMemory),
}
