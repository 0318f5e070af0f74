"""``check``: a compiled step and the arguments of one call, in its own mode or in others, on simulated ranks."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..call.dynamic_dims import argument_shapes
from ..call.rng import random_state_kept
from ..deferral.pending import calling, finish_pending
from ..modes.base import ParallelMode
from ..modes.data_parallel import DataParallel
from ..modes.option_groups import Split, check_one_of
from ..modes.shares import STYLES
from ..step import CompiledStep
from ..step_compiler import Rehearsal
from ..verification.copies import Copy, Subject
from ..verification.rank import SimulatedRank
from ..verification.world import AnyMesh, check_mesh, simulated_world
from .anew import compiled_anew
from .findings import Findings, InMode
from .noted import Noted
from .tracing import Tracing
from .whole import gathered_whole

_OWN = ""  # the name of the step's own mode


def check(
    step: Any, *args: Any, modes: Sequence[str] = (), world: int = 2, mesh: AnyMesh = None, **kwargs: Any
) -> Findings:
    """Find all that compiling a step refuses, in this process: nothing of the step runs, and nothing is changed.

    ``step`` is what ``spmd.compile`` made, and the other arguments are those of one call with the whole batch.
    ``modes`` are names of styles, such as ``"fully_shard"``; by default the step's own mode is checked. ``world`` ranks
    are simulated; ``mesh``: a dict from the names of axes to their sizes, ``{"dp": 2, "tp": 2}``.

    Raises ``TypeError`` or ``ValueError`` for what is no step, mode or mesh.
    """
    if isinstance(step, types.MethodType) and isinstance(step.__func__, CompiledStep):
        step, args = step.__func__, (step.__self__, *args)
    if not isinstance(step, CompiledStep):
        raise TypeError(f"expected a step that spmd.compile made, got {step!r}: decorate it with @spmd.compile")
    check_mesh(mesh, world)
    for each in modes:
        check_one_of("mode", each, tuple(STYLES))
    finish_pending()
    noted = Noted()
    subject = Subject(step, args, kwargs)
    with calling, random_state_kept(), simulated_world(world, mesh, subject.device_type) as device_mesh:
        found = [_in_mode(subject, each, device_mesh, noted) for each in modes or (_OWN,)]
    return Findings(subject.function.__qualname__.rpartition(".")[2], world, tuple(found))


def _in_mode(subject: Subject, name: str, mesh: DeviceMesh, noted: Noted) -> InMode:
    """The findings of one mode; ``noted``: the refusals of those before, which one trace goes past together."""
    own = subject.options.mode
    mode = own if name == _OWN else _of_style(own, name)
    tracing = Tracing(subject.function, partial(_rehearse, subject, mode, mesh), noted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of code of the user's that each trace runs
        tracing.run()
        refusals = tuple(sorted(tracing.refusals.values(), key=lambda each: (each.file, each.line)))
        known = InMode(name or _described(own), refusals, tuple(tracing.unseen))
        if refusals or tracing.found is None:
            return known
        made = tracing.found
        open_sizes = partial(_rehearse, subject, mode, mesh, _all_sizes(made))
        anew = compiled_anew(made, open_sizes)
    whole, not_kept = gathered_whole(made.made.local), made.why or made.not_kept
    return replace(known, is_compiled=True, anew=anew, whole=whole, not_kept=not_kept)


def _described(mode: ParallelMode) -> str:
    """A mode as its style is called, else by its class."""
    return mode.split.style if isinstance(mode, DataParallel) else type(mode).__name__


def _of_style(own: ParallelMode, name: str) -> ParallelMode:
    """The step's mode with another style."""
    if not isinstance(own, DataParallel):
        return DataParallel(name, inputs=own.inputs, input_batch_dim=own.input_batch_dim)  # type: ignore[arg-type]
    made = copy.copy(own)
    made.split = Split.check(name, False)
    return made


def _rehearse(
    subject: Subject,
    mode: ParallelMode,
    mesh: DeviceMesh,
    sizes: Mapping[str, Mapping[int, str]] | None = None,
) -> Rehearsal:
    """The program of one call on the first rank, which is not made. ``sizes``: those to leave open, by argument."""
    options = replace(subject.options, mode=mode)
    if sizes is not None:
        options = replace(options, dynamic=sizes)
    step = CompiledStep(subject.function, options)
    given = Copy(subject.args, subject.kwargs, mode.ignored, in_double=False)  # nothing is written to them
    return SimulatedRank(Subject(step, subject.args, subject.kwargs), given, 0, mesh).rehearse()


def _all_sizes(made: Rehearsal) -> dict[str, dict[int, str]]:
    """A name for each size of the arguments; equal ones of one dim have one."""
    shapes = argument_shapes(made.made.captured.program)
    return {
        name: {dim: f"{size} in dim {dim}" for dim, size in enumerate(shape) if size > 1}
        for name, shape in shapes.items()
    }
