"""Partition a program over an axis of stages: the share of one micro-batch, as all other axes have it, is divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.distributed.tensor import Replicate

from passes import AxisRole, Input, Output, OutputKind, PartitionError, PlacementError, Program
from passes.ir.program import Mesh, Placements
from passes.schedule.bundle_simulation import simulate_bundle
from passes.schedule.node_costs import device_of

from ..micro_batches.spread import fill_by_shape
from ..micro_batches.time_axis import partition_in_time
from ..partitioner.plan import Plan
from ..placements import OnStage
from .add_apart import add_apart, add_at_once
from .collect_rows import collect_rows
from .cut_model import StageOf, balanced_starts, fits_state, stages_by_name, stages_by_state
from .place_nodes import Placed, place_nodes
from .schedule_files import Actions
from .schedules import AUTO, SCHEDULES, Auto, Order, Schedule, orders, role_of
from .split_program import split_program

STAGES_AXIS = AxisRole("stages")
"""The role of the axis whose ranks have other parts of the model."""


@dataclass(frozen=True)
class Pipeline:
    """The division of a model. ``starts``: the module that begins each stage but the first, in order; None finds them.

    ``virtual``: the number of stages of a rank, for "auto" with "interleaved". ``actions``: those of a file, in the
    place of a schedule.
    """

    starts: tuple[str, ...] | None
    schedule: Schedule | Auto
    virtual: int = 1
    actions: Actions | None = None

    def of(self, schedule: Schedule) -> Pipeline:
        """The same with one schedule, where it has "auto"."""
        if self.schedule != AUTO:
            return self
        return replace(self, schedule=schedule, virtual=self.virtual if schedule == "interleaved" else 1)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart."""
        return self.schedule == "zb-h1" if self.actions is None else self.actions.splits_backward

    def orders(self, ranks: int, count: int) -> list[Order]:
        """For each rank its programs on ``count`` micro-batches. Raises ``PartitionError`` where these do not fit."""
        if self.actions is not None:
            if len(self.actions.of_ranks) != ranks:
                raise PartitionError(
                    f"expected a schedule for {ranks} ranks, a line for each, got {len(self.actions.of_ranks)}"
                )
            if count != self.actions.count:
                raise PartitionError(
                    f"expected as many micro-batches as the schedule has, {self.actions.count}, but rows make {count}"
                )
            return self.actions.orders()
        if self.virtual > 1 and count % ranks:
            raise PartitionError(
                f'expected micro_batches to be a multiple of {ranks}, the ranks of schedule="interleaved", got {count}'
            )
        assert self.schedule != AUTO, "one schedule of those that fit"
        return orders(self.schedule, ranks, self.virtual, count, role_of)


def partition_in_stages(
    program: Program,
    plan: Callable[[Program], Plan],
    pipeline: Pipeline,
    count: int,
    dtype: torch.dtype | None = None,
    rows: Mapping[str, int] | None = None,
) -> Program:
    """One rank's share of ``program``, with the bundle of all stages that run it in ``count`` micro-batches.

    ``plan``: makes the plan of a program whose state is whole on all stages; ``rows``, ``dtype``: as for
    ``partition_in_time``. With the schedule "auto" it takes the first of ``program.schedules``, or of all that fit the
    step the one that is estimated to be the fastest. Raises ``PartitionError`` for what stages cannot run, with the op
    and the user's line.
    """
    (axis,) = program.mesh.axes_with(STAGES_AXIS)
    _check_place(program, axis)
    share = partial(_share, program, plan, axis, count, dtype, rows)
    local, schedules = share(program.mesh), program.schedules
    if pipeline.schedule != AUTO:
        schedules = (pipeline.schedule,)
    elif not schedules:
        first = _at_first(program.mesh, axis)
        schedules = _fastest_first(program, local if first == program.mesh else share(first), pipeline, axis)
    return replace(_in_stages(program, local, pipeline.of(schedules[0]), axis), schedules=schedules)


def _share(
    program: Program,
    plan: Callable[[Program], Plan],
    axis: int,
    count: int,
    dtype: torch.dtype | None,
    rows: Mapping[str, int] | None,
    mesh: Mesh,
) -> Program:
    """The share of one micro-batch of a rank, which is whole along the axis of stages."""
    # Ranks of a stage are not at the same program at a time: what one wrote for others to read in memory that they
    # share, its next program would write over before all have read it. So they send messages.
    mesh = replace(mesh, axes=tuple(replace(each, shared=False) for each in mesh.axes))
    whole = replace(program, mesh=mesh, inputs=[_everywhere(each, axis) for each in program.inputs])
    local = partition_in_time(whole, plan(whole), count, dtype, rows, equal=True)
    _check(local, axis)
    fill_by_shape(local)
    return collect_rows(local)


def _at_first(mesh: Mesh, axis: int) -> Mesh:
    """The mesh as the first of all ranks of the same stage sees it, whose parts may have other lengths."""
    axes = [each if k == axis else replace(each, coordinate=0) for k, each in enumerate(mesh.axes)]
    return replace(mesh, axes=tuple(axes))


def _in_stages(program: Program, local: Program, pipeline: Pipeline, axis: int) -> Program:
    """The share of one micro-batch with the bundle that runs it."""
    assert local.micro_batches is not None, "the share of a micro-batch"
    ranks, kept = program.mesh.axes[axis].size, _kept(program, axis)
    order = pipeline.orders(ranks, local.micro_batches.count)
    local = replace(local, notes=list(local.notes))
    stage_of = _stages(program, local, pipeline, ranks, kept)
    place = partial(place_nodes, local, stage_of, ranks * pipeline.virtual, ranks, kept, pipeline.splits_backward)
    placed = place()
    while add_apart(local, placed):
        placed = place()
    add_at_once(placed)
    _check_homes(program, placed, axis)
    inputs = [replace(each, placement=_at_home(each, each.placement, placed, axis)) for each in local.inputs]
    outputs = [replace(each, placement=_at_home(each, each.placement, placed, axis)) for each in local.outputs]
    local = replace(local, inputs=inputs, outputs=outputs)
    return replace(local, stages=split_program(local, placed, axis, order))


def _fastest_first(program: Program, local: Program, pipeline: Pipeline, axis: int) -> tuple[Schedule, ...]:
    """The schedules that fit the step, by estimated seconds of a call; ``local``: a share that is equal on all ranks.

    Of schedules that take equally long, to three digits, those that keep fewer values come first. Raises
    ``PartitionError`` if none fits, and on a device of which nothing is known.
    """
    seconds, refused = dict[Schedule, float](), list[PartitionError | PlacementError]()
    for schedule in SCHEDULES:
        try:
            bundle = _in_stages(program, local.copy(), pipeline.of(schedule), axis).stages
        except (PartitionError, PlacementError) as error:
            refused.append(error)
            continue
        timeline = simulate_bundle(bundle, "step")
        if timeline is None:
            raise PartitionError(
                'schedule="auto" chooses by estimated seconds, but nothing is known of the speed of '
                f"{device_of(program)}: name a schedule"
            )
        seconds[schedule] = float(f"{timeline.seconds:.3g}")
    if not seconds:
        raise refused[0]
    return tuple(sorted(seconds, key=seconds.__getitem__))


def _stages(
    program: Program, local: Program, pipeline: Pipeline, ranks: int, kept: Mapping[str, frozenset[int]]
) -> StageOf:
    """The stage of each node of forward of ``local``: as named, else balanced, unless state is elsewhere."""
    count, named = ranks * pipeline.virtual, pipeline.starts
    if named is not None:
        if len(named) != count - 1:
            raise PartitionError(
                f"expected stages to name the first module of each of {count} stages but the first, got {list(named)}"
            )
        return stages_by_name(local, named)
    try:
        starts = balanced_starts(program, count)
    except PartitionError:
        if kept:
            return stages_by_state(local, kept, count, ranks)
        raise
    balanced = stages_by_name(local, starts)
    if not fits_state(local, balanced, kept, ranks):
        return stages_by_state(local, kept, count, ranks)
    local.notes.append(f"stages of the pipeline begin at {', '.join(starts)}, balanced by estimated seconds")
    return balanced


def check_without_stages(program: Program) -> None:
    """Raise ``PlacementError`` for state that stages keep, in a step that has none."""
    for declared in program.inputs:
        if any(isinstance(placement, OnStage) for placement in declared.placement):
            raise PlacementError(
                f"{declared.name} is kept on some stages of a pipeline, by an earlier step, but this one has none: "
                "give both the same stages"
            )


def _check_place(program: Program, axis: int) -> None:
    """Raise ``PartitionError`` for what stages have not been run on."""
    if program.mesh.axes[axis].size < 2:
        raise PartitionError(f"expected two or more ranks along {program.mesh.axes[axis].name}, which has the stages")


def _everywhere(declared: Input, axis: int) -> Input:
    """An input whose stage is not decided yet."""
    entries = [Replicate() if k == axis and isinstance(p, OnStage) else p for k, p in enumerate(declared.placement)]
    return replace(declared, placement=tuple(entries))


def _kept(program: Program, axis: int) -> dict[str, frozenset[int]]:
    """The stages that keep state already, by name."""
    found = {each.name: each.placement[axis] for each in program.inputs if each.placement}
    return {name: frozenset(p.stages) for name, p in found.items() if isinstance(p, OnStage)}


def _at_home(declared: Input | Output, placement: Placements, placed: Placed, axis: int) -> Placements:
    is_new = isinstance(declared, Output) and declared.kind is OutputKind.NEW
    home = placed.homes.get((declared.of if is_new else declared.name) or "")
    if home is None or len(home) == placed.ranks or not declared.shape:
        return placement
    return (*placement[:axis], OnStage(home), *placement[axis + 1 :])


def _check(local: Program, axis: int) -> None:
    """Raise ``PartitionError`` for a single run, and for state that is split over stages."""
    for declared in local.inputs:
        if declared.placement and declared.placement[axis].is_shard():
            raise PartitionError(
                f"{declared.name} is split over {local.mesh.axes[axis].name}, which has the stages: leave that axis "
                "out of its placement, and give all steps of a model the same axes"
            )
    micro = local.micro_batches
    assert micro is not None, "the share of a micro-batch"
    if micro.count < 2:
        raise PartitionError("a pipeline takes two or more micro-batches: pass a batch of two or more rows")


def _check_homes(program: Program, placed: Placed, axis: int) -> None:
    """Raise ``PlacementError`` where state is on other stages already."""
    for declared in program.inputs:
        has = declared.placement[axis] if declared.placement else Replicate()
        home = placed.homes.get(declared.name)
        if isinstance(has, OnStage) and home is not None and set(has.stages) != home:
            raise PlacementError(
                f"{declared.name} is kept on stages {list(has.stages)}, by an earlier step, but this one needs it on "
                f"{sorted(home)}: give both steps the same stages"
            )
