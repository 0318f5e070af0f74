"""From a share of one micro-batch to a program that runs for each: sums along the axis become accumulators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import AxisRole, Input, Kind, Output, OutputKind, PartitionError, Program
from passes.ir.collectives import group_of, is_collective, kind_of, reduction_of
from passes.ir.edit import add_input, insert_before
from passes.ir.micro_batches import ACCUMULATOR

from ..placements import chunk, splits
from .lines import described
from .row_wise import refused

aten = torch.ops.aten

TIME = "micro-batches"
"""The name of the axis, and of its group, in which nothing communicates."""

TIME_AXIS = AxisRole("micro_batches", of_ranks=False, at_once=False)
"""Its role: its parts run one after the other."""

TIME_AXIS_LAST = AxisRole("micro_batches, each reduced", of_ranks=False, at_once=False, sums_last=True)
"""Its role where each micro-batch reduces its own gradients."""


def sums_in_time(program: Program) -> list[fx.Node]:
    """The sums over micro-batches. Raises ``PartitionError`` for anything else that needs rows of several."""
    found = [node for node in program.graph.nodes if is_collective(node) and group_of(node) == TIME]
    for node in found:
        if kind_of(node) is not Kind.ALL_REDUCE or reduction_of(node) != "sum":
            raise refused(node)
    return found


def accumulate(
    program: Program, sums: Sequence[fx.Node], dtype: torch.dtype | None, levels: int = 1
) -> dict[str, tuple[str, ...]]:
    """Replace sums over micro-batches by accumulators, in ``dtype`` or in their own.

    Returns by the name of each those above it, where sums are those of a tree of several ``levels``.
    """
    names = [f"accumulated.{k}" for k in range(len(sums))]
    return {name: _accumulate(program, node, name, dtype, levels) for name, node in zip(names, sums, strict=True)}


def check_sums(program: Program, sums: set[fx.Node]) -> None:
    """Raise ``PartitionError`` where ranks add up floats that are no sum of a rank's parts, as ``sums`` are."""
    accumulators = {n for n, each in zip(program.placeholders, program.inputs, strict=True) if each.role is ACCUMULATOR}
    sums = set(sums)
    for node in program.graph.nodes:
        read = node.all_input_nodes
        reduces = is_collective(node) and kind_of(node) in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
        if reduces and node.meta["val"].is_floating_point() and not sums.issuperset(read):
            raise PartitionError(
                f"{described(node)} adds up over ranks what is no sum of parts of the batch, which "
                f'bits="same" does not support: {node.meta["collective"].why}'
            )
        if not accumulators.isdisjoint(read) or (read and reduces) or (len(read) == 1 and read[0] in sums):
            sums.add(node)


def _accumulate(program: Program, node: fx.Node, name: str, dtype: torch.dtype | None, levels: int) -> tuple[str, ...]:
    """Replace a sum over micro-batches by one that grows from run to run; returns the accumulators of upper levels."""
    (wait,) = node.users
    held = wait if "placement" in wait.meta else next(iter(wait.users))  # sums in a wider dtype are rounded behind it
    value: Any = node.args[0]
    own = value.meta["val"]
    wide = own.to(dtype) if dtype is not None and own.is_floating_point() else own
    placement = tuple(held.meta["placement"][:-1])
    of = node.meta["collective"].of  # of a gradient that ranks have parts of, its parameter has the global shape
    shape = next((each.shape for each in program.inputs if each.name in of), tuple(own.shape))
    declared = Input(ACCUMULATOR, name, shape, wide.dtype, placement)
    total = add_input(program, declared, wide)
    cast = value
    if wide.dtype is not own.dtype:
        cast = insert_before(node, aten._to_copy.default, value, like=wait, kwargs={"dtype": wide.dtype}, val=wide)
    grown = insert_before(node, aten.add.Tensor, total, cast, like=wait, val=wide)
    above = tuple(f"{name}.of_{2**level}" for level in range(1, levels))
    result = grown
    for each in above:
        upper = add_input(program, replace(declared, name=each), wide)
        result = insert_before(node, aten.add.Tensor, upper, result, like=wait, val=wide)
    if wide.dtype is not own.dtype:
        result = insert_before(node, aten._to_copy.default, result, like=wait, kwargs={"dtype": own.dtype}, val=own)
    result.meta |= {key: wait.meta[key] for key in ("grad_of", "captured") if key in wait.meta}
    result.meta["placement"] = held.meta["placement"]
    wait.replace_all_uses_with(result)
    program.graph.erase_node(wait)
    program.graph.erase_node(node)
    program.set_outputs(
        [*program.output_values(), grown],
        [
            *program.outputs,
            Output(OutputKind.UPDATE, name, ACCUMULATOR, declared.shape, declared.dtype, placement),
        ],
    )
    return above


def without_axis(program: Program, rows: Mapping[str, int], count: int, k: int) -> Program:
    """The same without the axis: in placements, in the mesh, and in the shapes of what each run has a part of."""
    for node in program.graph.nodes:
        placement: tuple[Any, ...] = node.meta.get("placement") or ()
        if len(placement) == len(program.mesh.axes):
            node.meta["placement"] = tuple(placement[:-1])
            if not isinstance(placement[-1], Replicate):
                node.meta["in_time"] = placement[-1]
    outputs = [replace(each, placement=each.placement[: len(program.mesh.axes) - 1]) for each in program.outputs]
    inputs = [_of_one_run(each, program, rows, count, k) for each in program.inputs]
    mesh = replace(program.mesh, axes=program.mesh.axes[:-1])
    return replace(program, inputs=inputs, outputs=outputs, mesh=mesh)


def _of_one_run(declared: Input, program: Program, rows: Mapping[str, int], count: int, k: int) -> Input:
    placement = declared.placement[: len(program.mesh.axes) - 1]
    dim = rows.get(declared.name)
    if dim is None:
        return replace(declared, placement=placement)
    ranks = prod(axis.size for axis, p in zip(program.mesh.axes, placement, strict=False) if splits(p, dim))
    length = ranks * chunk(declared.shape[dim] // ranks, count, k)[1]
    shape = (*declared.shape[:dim], length, *declared.shape[dim + 1 :])
    return replace(declared, placement=placement, shape=shape)


def joined_outputs(program: Program) -> dict[str, int]:
    """The results that are rows of all micro-batches, one after the other, with the dim of the rows."""
    last, found = len(program.mesh.axes) - 1, dict[str, int]()
    for each in program.outputs:
        along = each.placement[last] if len(each.placement) > last else Replicate()
        if each.kind is OutputKind.RESULT and isinstance(along, Shard):
            found[each.name] = along.dim
        elif not along.is_replicate():
            raise PartitionError(
                f"{each.name} is left after the step with rows of the batch, of which each micro-batch has its own: "
                "return it, or keep the batch whole (micro_batches=1)"
            )
    return found
