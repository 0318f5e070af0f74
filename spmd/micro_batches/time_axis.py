"""Partition a program with an axis of micro-batches behind the axes of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.distributed.tensor import Replicate, Shard

from passes import Axis, AxisRole, Input, PartitionError, Program, Role
from passes.ir.micro_batches import MicroBatches
from passes.ir.program import Placements

from ..partitioner.assignment import Assignment
from ..partitioner.emit_program import emit
from ..partitioner.plan import Plan
from ..partitioner.problem import Problem
from ..placements import local_shape
from .accumulate import TIME, accumulate, follow_the_run, joined_outputs, sums_in_time, without_axis
from .ahead import compute_ahead, early


def partition_in_time(program: Program, plan: Plan, count: int, dtype: torch.dtype | None = None) -> Program:
    """One rank's share of ``program``, to be run ``count`` times in a call, each time on a part of its rows.

    ``dtype``: that of accumulators; None is that of what they add up. Raises ``PartitionError``, with the op and the
    user's line, where a run would have to know rows of another one.
    """
    rows = _rows(program, plan, count)
    problems = [Problem.of(_on_axis(program, rows, count, k), _over_axis(program, plan, rows)) for k in (0, 1)]
    assignment = problems[0].complete(Assignment(problems[0].axes))
    local, second = (emit(problem, problem.complete(assignment)) for problem in problems)
    sums = sums_in_time(local)
    follow_the_run(local, second)
    ahead = early(local.graph, sums)
    whole = compute_ahead(local, program, plan, rows, ahead) if ahead else {}
    accumulate(local, sums_in_time(local), dtype)
    joined = joined_outputs(local)
    return replace(without_axis(local, rows, count), micro_batches=MicroBatches(count, rows, whole, joined))


def _rows(program: Program, plan: Plan, count: int) -> dict[str, int]:
    """The dim of the rows of each argument that has rows of the batch. Raises ``PartitionError`` for unequal parts."""
    over = program.mesh.axes_with(AxisRole.BATCH)
    found = {}
    for each in program.inputs:
        dims = {p.dim for k, p in enumerate(each.placement) if k in over and isinstance(p, Shard)}
        if each.role is not Role.BATCH or not dims:
            continue
        (found[each.name],) = dims
        _check_rows(each, found[each.name], program, count)
    if not found:
        raise PartitionError(
            f"expected an argument with rows of the batch, which micro_batches={count} divides, but {program.name} has "
            "none: pass the batch as an argument of the step"
        )
    return found


def _check_rows(declared: Input, dim: int, program: Program, count: int) -> None:
    ranks = [axis.size for axis, p in zip(program.mesh.axes, declared.placement, strict=True) if isinstance(p, Shard)]
    local = local_shape(declared.shape, declared.placement, program.mesh)[dim]
    if local % count or declared.shape[dim] % torch.Size(ranks).numel():
        raise PartitionError(
            f"micro_batches={count} takes a batch that each rank can divide by {count}, but this rank has {local} rows "
            f"of {declared.name}: pass batches of a multiple of {count} rows on each rank, or drop the last one"
        )


def _on_axis(program: Program, rows: Mapping[str, int], count: int, coordinate: int) -> Program:
    """The global program on a mesh whose last axis is that of micro-batches, seen from one of these."""
    roles = (AxisRole.BATCH, AxisRole.MICRO_BATCHES)
    axis = Axis(TIME, count, TIME, coordinate, rate=_slowest(program), roles=roles)
    mesh = replace(program.mesh, axes=(*program.mesh.axes, axis))
    inputs = [
        replace(each, placement=_placed(each.name, each.placement, rows)) if each.placement else each
        for each in program.inputs
    ]
    return replace(program, mesh=mesh, inputs=inputs)


def _slowest(program: Program) -> object:
    """The rate of the slowest axis: what would cross micro-batches is to be avoided like traffic."""
    return max((axis.rate for axis in program.mesh.axes), key=lambda rate: rate.per_byte)


def _placed(name: str, placement: Placements, rows: Mapping[str, int]) -> Placements:
    return (*placement, Shard(rows[name]) if name in rows else Replicate())


def _over_axis(program: Program, plan: Plan, rows: Mapping[str, int]) -> Plan:
    """The plan for that mesh: rows are split over the axis, and all else is whole in each micro-batch."""
    placed = {name: _placed(name, placement, rows) for name, placement in plan.placements.items()}
    updates = {name: (*placement, Replicate()) for name, placement in plan.updates.items()}
    cuts = {name: _placed(name, placement, rows) for name, placement in plan.cuts.items()}
    return replace(plan, placements=placed, updates=updates, cuts=cuts)
