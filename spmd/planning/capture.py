"""Capture and partition a step for a plan: on fake ranks, with models on meta or not; nothing runs, nothing changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import passes
from passes import DeadCode, DropDetach, DropProfiler, FoldViews, FormIslands, MergeEqual, Program

from ..call.rng import random_state_kept
from ..deferral.pending import calling
from ..modes.base import ParallelMode
from ..ranks.axis_roles import with_roles
from ..step import CompiledStep
from ..verification.world import simulated_world
from .kernels import Section, sections_of

_CLEANUP = (DropProfiler(), DropDetach(), FoldViews(), MergeEqual(), DeadCode())


def partitioned(
    step: CompiledStep[..., Any],
    mode_on: Callable[[DeviceMesh], ParallelMode],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mapping[str, int],
) -> Program:
    """The share of the first rank of ``mesh``, whose ranks pass ``args`` each, in another mode than the step's own."""
    program = captured(step, mode_on, args, kwargs, mesh)
    with simulated_world(math.prod(mesh.values()), mesh, "cpu") as device_mesh:
        return mode_on(device_mesh).partition(program)


def captured(
    step: CompiledStep[..., Any],
    mode_on: Callable[[DeviceMesh], ParallelMode],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mapping[str, int],
) -> Program:
    """The step before it is partitioned, on global shapes."""
    with calling, random_state_kept(), simulated_world(math.prod(mesh.values()), mesh, "cpu") as device_mesh:
        step = CompiledStep(step.function, replace(step.options, mode=mode_on(device_mesh)))
        return step.runner.capture(step.runner.read(args, dict(kwargs)))


def partitioned_on(program: Program, mode_on: Callable[[DeviceMesh], ParallelMode], mesh: Mapping[str, int]) -> Program:
    """The share of the first rank of ``mesh`` of a program that was captured on a mesh with as many axes.

    Both split the batch among as many ranks, which determine its global shapes.
    """
    with simulated_world(math.prod(mesh.values()), mesh, "cpu") as device_mesh:
        mode, own = mode_on(device_mesh), program.mesh
        pairs = zip(own.axes, mesh.items(), strict=True)
        own = replace(own, axes=tuple(replace(axis, name=name, size=size) for axis, (name, size) in pairs))
        return mode.partition(replace(program, mesh=with_roles(own, mode.axis_roles(tuple(mesh)))))


def sections(local: Program, fused: bool) -> list[Section]:
    """Its sections; ``fused``: with pointwise ops between matrix products as islands, as a compiler of kernels does."""
    pipeline = (*_CLEANUP, FormIslands()) if fused else _CLEANUP
    return sections_of(passes.run(local, pipeline, check=False))
