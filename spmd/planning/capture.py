"""Capture and partition a step for a plan: on fake ranks, with models on meta or not; nothing runs, nothing changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import passes
from passes import DeadCode, DropDetach, DropProfiler, FoldViews, FormIslands, MergeEqual, Program

from ..call.rng import random_state_kept
from ..deferral.pending import calling
from ..modes.base import ParallelMode
from ..step import compile
from ..verification.world import simulated_world
from .kernels import Section, sections_of

_CLEANUP = (DropProfiler(), DropDetach(), FoldViews(), MergeEqual(), DeadCode())


def partitioned(
    function: Callable[..., Any],
    mode_on: Callable[[DeviceMesh], ParallelMode],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: Mapping[str, int],
) -> Program:
    """The share of the first rank of ``mesh``, whose ranks pass ``args`` each, in the mode that there is for it."""
    with calling, random_state_kept(), simulated_world(math.prod(mesh.values()), mesh, "cpu") as device_mesh:
        step = compile(parallel_mode=mode_on(device_mesh))(function)
        captured = step.capture(step.read(args, dict(kwargs)))
        local: Program = step.options.mode.partition(captured)
    return local


def sections(local: Program, fused: bool) -> list[Section]:
    """Its sections; ``fused``: with pointwise ops between matrix products as islands, as a compiler of kernels does."""
    pipeline = (*_CLEANUP, FormIslands()) if fused else _CLEANUP
    return sections_of(passes.run(local, pipeline, check=False))
