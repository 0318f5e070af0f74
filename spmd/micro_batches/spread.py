"""Spread the parts of a step with the same bits over any number of ranks along one axis.

Each rank has the program of a single rank that has all parts, and runs some that follow each other, once all ranks have
gathered the arguments. So it has sums of whole subtrees of the balanced tree. Behind its last part ranks exchange
these, and each finishes the tree. All run equally often, since runs gather state of which ranks have parts: a rank of
fewer parts than others first runs one of them for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Axis, Collective, Input, Kind, Output, OutputKind, PartitionError, Program, Role
from passes.analysis.strides import Layouts
from passes.ir.collectives import WAIT, c10d
from passes.ir.edit import add_input, insert_before
from passes.ir.micro_batches import ACCUMULATOR, subtrees
from passes.ir.ops import Trait, has
from passes.ir.program import Placements, Spread
from passes.ir.schemas import argument

from ..partitioner.plan import Plan
from .state_in_parts import keep_parts, with_whole_state
from .time_axis import partition_in_time

aten = torch.ops.aten


def partition_and_spread(program: Program, plan: Plan, virtual: int, over: int, together: int | None = None) -> Program:
    """One rank's share along the axis ``over``, the only one of several ranks: its runs of ``virtual`` parts.

    ``together``: as for ``partition_in_time``.
    """
    mesh, axis = program.mesh, program.mesh.axes[over]
    others = [each.name for each in mesh.axes if each is not axis and each.size > 1]
    if others:
        raise PartitionError(
            f'bits="same" on {axis.size} ranks along {axis.name} takes no other axis of several ranks, got {others}: '
            "pass mesh= with axes of 2 for those that split the batch"
        )
    if axis.size > virtual:
        raise PartitionError(f'bits="same" has virtual={virtual} parts for {axis.size} ranks: pass more, on any number')
    axes = [replace(each, size=1, coordinate=0) for each in mesh.axes]
    on_one = replace(program, mesh=replace(mesh, axes=tuple(axes)))
    whole = with_whole_state(program, plan)
    local = partition_in_time(on_one, whole, virtual, levels=1, over=axis, together=together)
    micro = local.micro_batches
    if micro is None:
        split = _split([each for each in local.inputs if each.role is Role.BATCH], over)
        _replicate(local, over, 1, split, _split([o for o in local.outputs if o.kind is OutputKind.RESULT], over))
        fill_by_shape(local)
        local = replace(local, mesh=mesh)
        keep_parts(local, plan)
        return local
    rows = {each.name: each.shape[micro.split[each.name]] for each in program.inputs if each.name in micro.split}
    spread = Spread(axis.coordinate, axis.size, axis.group, rows)
    _replicate(local, over, axis.size, micro.split, micro.joined)
    fill_by_shape(local)
    tree = _exchange(local, axis, [spread.runs(micro.count, rank) for rank in range(axis.size)], micro.count)
    note = (
        f"{axis.size} ranks along {axis.name} cut {virtual} parts otherwise than the batch: before the first part each "
        f"gathers all rows of {', '.join(rows)}, which no collective of the program shows"
    )
    micro = replace(micro, tree=tree, spread=spread)
    local = replace(local, mesh=mesh, micro_batches=micro, notes=[*local.notes, note])
    keep_parts(local, plan)
    return local


def _split(declared: Sequence[Input | Output], over: int) -> dict[str, int]:
    """The dims of those that the axis splits, by name."""
    placed = {each.name: each.placement[over] for each in declared if len(each.placement) > over}
    return {name: entry.dim for name, entry in placed.items() if isinstance(entry, Shard)}


def _replicate(program: Program, over: int, ranks: int, split: Mapping[str, int], joined: Mapping[str, int]) -> None:
    """Along the axis ranks have all of all values, but rows of their own of arguments and results.

    ``ranks``: as often there are the rows that inputs in ``split`` say.
    """
    given = set[fx.Node]()
    for k, (each, node) in enumerate(zip(program.inputs, program.placeholders, strict=True)):
        if each.name in split:
            given.add(node)
            dim = split[each.name]
            shape = (*each.shape[:dim], each.shape[dim] * ranks, *each.shape[dim + 1 :])
            program.inputs[k] = replace(each, shape=shape)
        else:
            program.inputs[k] = replace(each, placement=_placed(each.placement, over))
    program.outputs = [
        replace(
            each, placement=_placed(each.placement, over, Shard(joined[each.name]) if each.name in joined else None)
        )
        for each in program.outputs
    ]
    for node in program.graph.nodes:
        if node.meta.get("placement") and node not in given:
            node.meta["placement"] = _placed(node.meta["placement"], over)


def _placed(placement: Placements, over: int, entry: Shard | None = None) -> Placements:
    return tuple((entry or Replicate()) if k == over else each for k, each in enumerate(placement))


def fill_by_shape(program: Program) -> None:
    """Let fills, as of the gradient of a loss, not wait for the sum that they have the shape of."""
    layouts = Layouts(program.graph)
    for node in list(program.graph.nodes):
        val = node.meta.get("val")
        is_fill = node.op == "call_function" and has(node.target, Trait.ZEROS, Trait.ONES, Trait.FULL)
        if is_fill and node.all_input_nodes and layouts.is_contiguous(node):
            is_any = has(node.target, Trait.FULL)
            number = argument(node, "fill_value") if is_any else int(has(node.target, Trait.ONES))
            options = {"dtype": val.dtype, "device": val.device}
            full = insert_before(node, aten.full.default, list(val.shape), number, like=node, kwargs=options, val=val)
            full.meta = dict(node.meta)
            node.replace_all_uses_with(full)
            program.graph.erase_node(node)


def _exchange(program: Program, axis: Axis, ranks: Sequence[range], virtual: int) -> dict[str, tuple[str, ...]]:
    """Let all that reads sums read those of all ranks; returns, by accumulator, those of a rank's subtrees.

    ``ranks``: the parts of each.
    """
    assert program.micro_batches is not None
    count = max(len(subtrees(parts.start, part)) for parts in ranks for part in parts)
    # What each rank sends: the subtrees before its last part, in their slots, and that part.
    trees = [dict(enumerate(subtrees(parts.start, parts[-1]))) | {count: (0, parts[-1])} for parts in ranks]
    given = {tree: rank * (count + 1) + slot for rank, of in enumerate(trees) for slot, tree in of.items()}
    declared = {each.name: each for each in program.inputs}
    named = dict(zip((each.name for each in program.outputs), program.output_values(), strict=True))
    found = {}
    for name in program.micro_batches.tree:
        grown = named[name]
        slots = [replace(declared[name], name=f"{name}.slot{k}") for k in range(count)]
        held = [add_input(program, each, grown.meta["val"]) for each in slots]
        readers = [node for node in grown.users if node.op != "output"]
        _finish(program, grown, readers, _total(grown, [*held, grown], axis, given, virtual))
        found[name] = tuple(each.name for each in slots)
    return found


def _total(
    grown: fx.Node, held: list[fx.Node], axis: Axis, given: Mapping[tuple[int, int], int], virtual: int
) -> fx.Node:
    """The sum over all parts, from what each rank has: its ``held``; ``given``: where subtrees are in what all have."""
    val, before = grown.meta["val"], grown.next
    role = Role.GRADIENT if "grad_of" in grown.meta else ACCUMULATOR
    why = f"sums of parts of the batch, which each rank along {axis.name} adds up in one order"
    of = (grown.meta["grad_of"],) if "grad_of" in grown.meta else ()

    def emit(op: Any, *args: Any, val: Any) -> fx.Node:
        node = insert_before(before, op, *args, like=grown, val=val)
        node.meta.pop("grad_of", None)
        node.meta["placement"] = grown.meta["placement"]
        return node

    stacked = emit(aten.stack.default, held, val=torch.stack([val] * len(held)))
    whole = stacked.meta["val"].new_empty(axis.size * len(held), *val.shape)
    started = emit(c10d.all_gather_into_tensor.default, stacked, axis.size, axis.group, val=whole)
    started.meta["collective"] = Collective(Kind.ALL_GATHER, axis.name, None, role, why, of)
    started.meta["most_bytes"] = whole.nbytes
    gathered = emit(WAIT, started, val=whole)

    def node_of(level: int, number: int) -> fx.Node:
        if (level, number) in given:
            return emit(aten.select.int, gathered, 0, given[level, number], val=whole[0])
        left, right = node_of(level - 1, 2 * number), node_of(level - 1, 2 * number + 1)
        return emit(aten.add.Tensor, left, right, val=val)

    return node_of(virtual.bit_length() - 1, 0)


def _finish(program: Program, grown: fx.Node, readers: Sequence[fx.Node], total: fx.Node) -> None:
    """Let the readers of what a rank has, and results, read the total in its place."""
    total.meta |= {key: grown.meta[key] for key in ("grad_of", "captured") if key in grown.meta}
    grown.meta.pop("captured", None)
    for node in readers:
        node.replace_input_with(grown, total)
    pairs = zip(program.outputs, program.output_values(), strict=True)
    is_read = [value is grown and out.role is not ACCUMULATOR for out, value in pairs]
    values = [total if reads else value for reads, value in zip(is_read, program.output_values(), strict=True)]
    program.set_outputs(values, program.outputs)
