"""Partition a program with an axis of micro-batches behind the axes of ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Axis, AxisRole, Input, PartitionError, Program, Role
from passes.ir.program import MicroBatches, Placements
from passes.ir.rates import Rate

from ..partitioner.assignment import Assignment
from ..partitioner.partition_program import emit, emit_again
from ..partitioner.plan import Plan
from ..partitioner.prepare import prepared
from ..partitioner.solvers.problem import Problem
from ..placements import chunk, local_shape
from .accumulate import TIME, TIME_AXIS, TIME_AXIS_LAST, accumulate, joined_outputs, sums_in_time, without_axis
from .added_to_state import add_to_state_last
from .early_sums import compute_early, early, floats, of_activations
from .equal_rows import compute_equal_rows_in_part
from .follow_the_run import add_run, follow_the_run
from .lines import described
from .own_statistics import keep_own
from .side_by_side import side_by_side


def partition_in_time(
    program: Program,
    plan: Plan,
    count: int,
    dtype: torch.dtype | None = None,
    rows: Mapping[str, int] | None = None,
    levels: int = 0,
    keeps_own: bool = False,
    equal: bool = False,
    over: Axis | None = None,
    together: int | None = None,
) -> Program:
    """One rank's share of ``program``, to be run ``count`` times in a call, each time on a part of its rows.

    Rows are cut as ``torch.chunk`` does it, so that the last part may be shorter, and parts may be fewer. A step that
    takes equal parts alone (it merges rows with other dims, or they have to be ``equal``) runs more often then, and a
    note says so. ``dtype``: that of accumulators; None is that of what they add up. ``rows``: the dim of the rows of
    each argument, on a mesh without an axis that splits the batch. ``levels``: parts are equal, and their sums those of
    a balanced tree, of which a rank has so many levels. ``keeps_own``: parts are equal, and statistics are those of
    each. ``over``: the axis along which ranks divide parts that need sums of all. ``together``: how many of the
    ``count`` parts a run computes side by side; None: all where a part needs sums of all, else one. Raises
    ``PartitionError``, with the op and the user's line, where a run needs rows of another one.
    """
    rows = rows or _rows(program, plan, count)
    batch = [each for each in program.inputs if each.name in rows]
    lengths = [local_shape(each.shape, each.placement, program.mesh)[rows[each.name]] for each in batch]
    if levels:
        return _Shares(program, plan, rows, count, dtype, levels, over=over, together=together).of(0, follows=True)
    most = max(*lengths, 1)
    parts = -(-most // -(-most // count))
    if keeps_own:
        _check_equal(batch, lengths, count)
        return _Shares(program, plan, rows, count, dtype, keeps_own=True).of(0, follows=count > 1)
    if not _leaves_rest(lengths, parts):
        return _Shares(program, plan, rows, parts, dtype).of(0, follows=parts > 1)
    try:
        if equal:
            raise PartitionError(f"expected at least two equal parts of {lengths[0]} rows, got micro_batches={count}")
        for each, length in zip(batch, lengths, strict=True):
            _check_parts(each, length, parts)
        return _with_shorter_end(_Shares(program, plan, rows, parts, dtype))
    except PartitionError:
        even = next((k for k in range(parts, min(lengths) + 1) if not _leaves_rest(lengths, k)), None)
        if even is None:
            raise
        local = _Shares(program, plan, rows, even, dtype).of(0, follows=even > 1)
        note = (
            f"micro_batches={count} does not divide the {lengths[0]} rows of {batch[0].name} on a rank, and the step "
            f"takes equal parts alone: it runs {even} times. Pass a multiple of {count}"
        )
        return replace(local, notes=[*local.notes, note])


def _check_equal(batch: Sequence[Input], lengths: Sequence[int], count: int) -> None:
    for each, length in zip(batch, lengths, strict=True):
        if length % count:
            raise PartitionError(
                f'statistics="per_micro_batch" takes micro-batches of equal size, but {each.name} has {length} rows on '
                f"a rank for {count} of them: pass a multiple of {count}, or drop the last batch"
            )


def _leaves_rest(lengths: Sequence[int], parts: int) -> bool:
    return any(length % parts for length in lengths)


def _with_shorter_end(shares: _Shares) -> Program:
    """The program of the last micro-batch, which is shorter, beside that of the others."""
    full, last = shares.of(0, follows=shares.count > 2), shares.of(shares.count - 1)
    names = [[each.name for each in program.inputs] for program in (full, last)]
    assert names[0] == names[1], "the shares differ in sizes alone"
    return replace(last, earlier={"accumulating": replace(full, micro_batches=None)})


@dataclass
class _Shares:
    """The shares of single micro-batches; all are computed as the first one is."""

    program: Program
    plan: Plan
    rows: Mapping[str, int]
    count: int
    dtype: torch.dtype | None
    levels: int = 0
    keeps_own: bool = False
    over: Axis | None = None
    together: int | None = None

    def __post_init__(self) -> None:
        ranks = prod(self.program.mesh.axes[k].size for k in self.program.mesh.axes_with(AxisRole.BATCH))
        self.program = add_to_state_last(prepared(self.program, parts=ranks * self.count), self.rows)
        self._assignment: Assignment | None = None  # that of the first one, once it is emitted
        self._takes_run = False

    def of(self, k: int, follows: bool = False) -> Program:
        """That of micro-batch ``k``, which accumulates sums over all of them; ``follows``: it is to run for others."""
        local = self._emitted(k)
        sums = sums_in_time(local)
        if follows:
            self._takes_run = follow_the_run(local, self._emitted_again(k + 1))
        elif self._takes_run or local.draws:
            add_run(local)  # a shorter last micro-batch takes what the others take
        joined = joined_outputs(local)
        ahead = early(local.graph, sums, _values(local, joined))
        if self.levels and (needed := [*floats(ahead), *of_activations(self.program, ahead)]):
            lines = ", ".join(dict.fromkeys(map(described, needed)))
            if self.together is not None:
                raise PartitionError(
                    f"{lines}: each part of the batch needs sums of all, which are known only when all have run: leave "
                    'out micro_batches with bits="same", so that a rank computes its parts together'
                )
            note = f"{lines}: each part of the batch needs sums of all, so that a rank computes its parts together"
            together = side_by_side(local, self.rows, joined, self.count, self.over)
            return replace(without_axis(together, {}, self.count, k), notes=[*local.notes, note])
        own = of_activations(self.program, ahead) if self.keeps_own else []
        if own:
            given = [node for node in ahead if node not in own]
            others = [node for node in sums if node not in given]
            keep_own(local, others, own, _values(local, joined), self.count)
            sums = sums_in_time(local)
            ahead = early(local.graph, sums, _values(local, joined))
        whole = compute_early(local, self.program, self.plan, self.rows, ahead) if ahead else {}
        sums = sums_in_time(local)
        assert not early(local.graph, sums, _values(local, joined)), "what a run needs of others is computed ahead"
        parts = self.together or 1
        if parts > 1:
            local = side_by_side(local, self.rows, joined, parts, in_runs=True)
            sums = sums_in_time(local)
        tree, runs = accumulate(local, sums, self.dtype, max(self.levels, 1)), self.count // parts
        micro = MicroBatches(runs, self.rows, whole, joined, tree if self.levels else {}, together=parts)
        return replace(without_axis(local, self.rows, runs, k), micro_batches=micro)

    def _emitted(self, k: int) -> Program:
        problem = self._problem(k)
        program = emit(problem, self._assignment or problem.given())
        self._assignment = self._assignment or program.assignment
        compute_equal_rows_in_part(program)
        return program

    def _emitted_again(self, k: int) -> Program:
        """That of another micro-batch with as many rows."""
        assert self._assignment is not None, "the first one is emitted"
        program = emit_again(self._problem(k), self._assignment)
        compute_equal_rows_in_part(program)
        return program

    def _problem(self, k: int) -> Problem:
        sums_last = self.plan.options.get("reduce_gradients") == "each"
        on_axis = _on_axis(self.program, self.rows, self.count, k, sums_last)
        return Problem.of(on_axis, _over_axis(self.program, self.plan, self.rows))


def _values(program: Program, names: Collection[str]) -> set[fx.Node]:
    """The nodes of some outputs."""
    pairs = zip(program.output_values(), program.outputs, strict=True)
    return {value for value, output in pairs if output.name in names}


def _rows(program: Program, plan: Plan, count: int) -> dict[str, int]:
    """The dim of the rows of each argument that has rows of the batch; raises ``PartitionError`` if there is none."""
    over = program.mesh.axes_with(AxisRole.BATCH)
    found = {}
    for each in program.inputs:
        dims = {p.dim for k, p in enumerate(each.placement) if k in over and isinstance(p, Shard)}
        if each.role is Role.BATCH and dims:
            (found[each.name],) = dims
            _check_even(each, found[each.name], program)
    if not found:
        advice = "" if over else ", and leave it out of inputs=, whose arguments are whole in each micro-batch"
        raise PartitionError(
            f"expected an argument with rows of the batch, which micro_batches={count} divides, but {program.name} has "
            f"none: pass the batch as an argument of the step{advice}"
        )
    return found


def _check_even(declared: Input, dim: int, program: Program) -> None:
    pairs = zip(program.mesh.axes, declared.placement, strict=True)
    ranks = prod(axis.size for axis, p in pairs if isinstance(p, Shard) and p.dim == dim)
    if declared.shape[dim] % ranks:
        raise PartitionError(
            f"micro_batches takes equal numbers of rows on all ranks, but {declared.name} has {declared.shape[dim]} "
            f"rows for {ranks} ranks: pass equal parts, or drop the last batch"
        )


def _check_parts(declared: Input, length: int, count: int) -> None:
    if chunk(length, count, max(count - 2, 0))[1] != chunk(length, count, 0)[1]:
        raise PartitionError(
            f"micro_batches cuts rows into {count} parts, all but the last one of equal length, but {declared.name} "
            f"has other rows than the rest, {length} on each rank: pass as many rows of it, or name it in inputs as "
            "Replicate()"
        )


def _on_axis(program: Program, rows: Mapping[str, int], count: int, coordinate: int, sums_last: bool) -> Program:
    """The global program on a mesh whose last axis is that of micro-batches, seen from one of these."""
    roles = (AxisRole.BATCH, TIME_AXIS_LAST if sums_last else TIME_AXIS)
    axis = Axis(TIME, count, TIME, coordinate, rate=_slowest(program), roles=roles)
    mesh = replace(program.mesh, axes=(*program.mesh.axes, axis))
    inputs = [
        replace(each, placement=_placed(each.name, each.placement, rows)) if each.placement else each
        for each in program.inputs
    ]
    inputs = [replace(each, role=Role.BATCH) if each.name in rows else each for each in inputs]
    return replace(program, mesh=mesh, inputs=inputs)


def _slowest(program: Program) -> Rate:
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
