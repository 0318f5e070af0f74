"""From a share of one micro-batch to a program that runs for each: sums along the axis become accumulators."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate

from passes import Input, Kind, Output, OutputKind, PartitionError, Program, Role
from passes.ir.collectives import group_of, is_collective, is_wait, kind_of, reduction_of
from passes.ir.edit import insert_before
from passes.ir.meta import Relation
from passes.ir.micro_batches import MicroBatches
from passes.ir.program import Placements
from passes.ir.schemas import name_of
from passes.runtime.random import draw

aten = torch.ops.aten

TIME = "micro-batches"
"""The name of the axis, and of its group, in which nothing communicates."""
_RUN = "micro-batch"  # the input that says which one runs


def accumulated(
    first: Program, second: Program, rows: Mapping[str, int], count: int, dtype: torch.dtype | None
) -> Program:
    """``first``, the share of micro-batch 0, as a program for all of them; ``second`` is that of micro-batch 1.

    The two may differ in where random draws begin, alone. Raises ``PartitionError`` where they differ in more, or where
    a sum over micro-batches is needed before the last of them.
    """
    program = first.copy()
    _follow_the_run(program, second)
    sums = [node for node in program.graph.nodes if is_collective(node) and group_of(node) == TIME]
    for node in sums:
        _check_sum(node)
    added = [_accumulate(program, node, dtype) for node in sums]
    _check_independent(program, added)
    return replace(
        _without_axis(program, rows, count), micro_batches=MicroBatches(count, dict(rows)), graph_module=program.graph_module
    )


def _follow_the_run(program: Program, second: Program) -> None:
    """Let the draws whose rows are others in each micro-batch begin there; all else must be equal."""
    run: fx.Node | None = None
    other = {}
    for node, its in zip(list(program.graph.nodes), second.graph.nodes, strict=False):
        other[node] = its
        moved = node.target is draw and its.target is draw and node.args[3] != its.args[3]
        here = (node.args[:3], *node.args[4:]) if moved else node.args
        there = (its.args[:3], *its.args[4:]) if moved else its.args
        if node.op != its.op or node.target != its.target or _mapped((here, node.kwargs), other) != (there, its.kwargs):
            raise PartitionError(
                f"{_described(node)} computes with the position of a micro-batch in the batch, which micro_batches "
                "does not support: compute it before the step, and pass it as an argument with rows of the batch"
            )
        if moved:
            run = run or _input(program, Input(Role.RUN, _RUN), 0)
            node.update_arg(3, _moving(node, run, its.args[3]))


def _mapped(value: Any, other: Mapping[fx.Node, fx.Node]) -> Any:
    return fx.map_arg(value, other.__getitem__)


def _moving(node: fx.Node, run: fx.Node, next_region: Sequence[Sequence[int]]) -> list[Any]:
    """The region of a draw, whose starts move on from micro-batch to micro-batch."""
    region: list[Any] = []
    for (start, length, size), (then, *_) in zip(node.args[3], next_region, strict=True):  # type: ignore[arg-type]
        if then != start:
            by = insert_before(node, operator.mul, run, then - start, like=None, val=0)
            start = insert_before(node, operator.add, start, by, like=None, val=start)
        region.append((start, length, size))
    return region


def _check_sum(node: fx.Node) -> None:
    if kind_of(node) is not Kind.ALL_REDUCE or reduction_of(node) != "sum":
        raise PartitionError(
            f"{_described(node)} needs rows of all micro-batches at once: {node.meta['collective'].why}. Keep the "
            "batch whole (micro_batches=1), or write the step so that only sums over rows are needed"
        )


def _accumulate(program: Program, node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    """Replace a sum over micro-batches by one that grows from run to run; returns its new value."""
    (wait,) = node.users
    value: Any = node.args[0]
    own = value.meta["val"]
    wide = own.to(dtype) if dtype is not None and own.is_floating_point() else own
    name = f"accumulated.{len([each for each in program.inputs if each.role is Role.ACCUMULATOR])}"
    placement = tuple(wait.meta["placement"][:-1])
    declared = Input(Role.ACCUMULATOR, name, tuple(own.shape), wide.dtype, placement)
    total = _input(program, declared, wide)
    cast = value
    if wide.dtype is not own.dtype:
        cast = insert_before(node, aten._to_copy.default, value, like=wait, kwargs={"dtype": wide.dtype}, val=wide)
    grown = insert_before(node, aten.add.Tensor, total, cast, like=wait, val=wide)
    result = grown
    if wide.dtype is not own.dtype:
        result = insert_before(node, aten._to_copy.default, grown, like=wait, kwargs={"dtype": own.dtype}, val=own)
    for key in ("grad_of", "captured", "placement"):
        if key in wait.meta:
            result.meta[key] = wait.meta[key]
    result.meta["placement"] = wait.meta["placement"]
    wait.replace_all_uses_with(result)
    program.graph.erase_node(wait)
    program.graph.erase_node(node)
    program.set_outputs(
        [*program.output_values(), grown],
        [*program.outputs, Output(OutputKind.UPDATE, name, Role.ACCUMULATOR, declared.shape, declared.dtype, placement)],
    )
    return grown


def _input(program: Program, declared: Input, val: Any) -> fx.Node:
    """A new input, behind all others."""
    last = program.placeholders[-1]
    with program.graph.inserting_after(last):
        node = program.graph.placeholder(declared.name.replace(".", "_").replace("-", "_"))
    node.meta["val"] = val
    program.inputs = [*program.inputs, declared]
    return node


def _check_independent(program: Program, added: Sequence[fx.Node]) -> None:
    """Raise ``PartitionError`` where a micro-batch needs a sum over all of them before it can go on."""
    needs: dict[fx.Node, fx.Node] = {}  # the sum that a node depends on
    for node in program.graph.nodes:
        found = next((needs[each] for each in node.all_input_nodes if each in needs), None)
        if found is not None and node in added:
            raise PartitionError(
                f"{_described(found)} is a sum over the whole batch, and {_described(node)} needs it in each micro-batch"
            )
        if node in added:
            needs[node] = node
        elif found is not None:
            needs[node] = found


def _without_axis(program: Program, rows: Mapping[str, int], count: int) -> Program:
    """The same without the axis: in placements, in the mesh, and in the shapes of what each run has a part of."""
    for node in program.graph.nodes:
        placement = node.meta.get("placement") or ()
        if len(placement) == len(program.mesh.axes):
            node.meta["placement"] = tuple(placement[:-1])
            if not isinstance(placement[-1], Replicate):
                node.meta["in_time"] = placement[-1]
    outputs = [replace(each, placement=_checked(each, program)) for each in program.outputs]
    inputs = [_of_one_run(each, program, rows, count) for each in program.inputs]
    mesh = replace(program.mesh, axes=program.mesh.axes[:-1])
    return replace(program, inputs=inputs, outputs=outputs, mesh=mesh)


def _of_one_run(declared: Input, program: Program, rows: Mapping[str, int], count: int) -> Input:
    placement = declared.placement[: len(program.mesh.axes) - 1]
    dim = rows.get(declared.name)
    if dim is None:
        return replace(declared, placement=placement)
    shape = tuple(size // count if k == dim else size for k, size in enumerate(declared.shape))
    return replace(declared, placement=placement, shape=shape)


def _checked(output: Output, program: Program) -> Placements:
    if len(output.placement) < len(program.mesh.axes):
        return output.placement
    if not isinstance(output.placement[-1], Replicate):
        raise PartitionError(
            f"{output.name} has rows of the batch, of which each micro-batch knows its own: return sums or means over "
            "rows (the loss), or keep the batch whole (micro_batches=1)"
        )
    return output.placement[:-1]


def _described(node: fx.Node) -> str:
    """An op with the module and the user's line it belongs to."""
    op = name_of(node.target) if node.op == "call_function" else node.name
    at = f" at {node.meta['module']}" if node.meta.get("module") else ""
    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
    return f"{op}{at}{line}"

