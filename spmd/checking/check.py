"""``check``: a compiled step and the arguments of one call, in its own mode or in others, on simulated ranks."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from passes import SpmdError

from ..call.rng import random_state_kept
from ..call.state import parameters_of
from ..modes.base import ParallelMode
from ..modes.data_parallel import DataParallel
from ..modes.option_groups import Gathers, Split, Wire, check_one_of
from ..modes.shares import STYLES
from ..step import CompiledStep
from ..verification.copies import Subject
from ..verification.world import AnyMesh, check_mesh, simulated_world
from .anew import compiled_anew
from .findings import Findings, InMode
from .noted import Noted
from .refusal import Refusal
from .rehearsals import Rehearsals
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
    subject, noted, found = Subject(step, args, kwargs), Noted(), list[InMode]()
    with random_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's code, which each trace runs
        with simulated_world(world, mesh, _device_type(subject)) as device_mesh:
            for name in modes or (_OWN,):
                anew = next((each.anew for each in found if each.is_compiled), None)
                found.append(_in_mode(subject, name, device_mesh, noted, anew))
    return Findings(subject.function.__qualname__.rpartition(".")[2], world, tuple(found))


def _device_type(subject: Subject) -> str:
    """The kind of device that the step computes on: a model on the meta device does so where its batch is."""
    try:
        given = subject.read(subject.args, subject.kwargs)
    except (SpmdError, TypeError):  # which each mode finds
        return "cpu"
    tensors = [each.tensor for each in parameters_of(given.modules)] + [leaf.value for leaf in given.tensors()]
    return next((each.device.type for each in tensors if not each.is_meta), "cpu")


def _in_mode(subject: Subject, name: str, mesh: DeviceMesh, noted: Noted, anew: tuple[str, ...] | None) -> InMode:
    """The findings of one mode. ``noted`` has the refusals of those before, which one trace goes past together.

    ``anew``: what compiles another program, if a mode before has shown it: it does not depend on the mode.
    """
    own = subject.options.mode
    try:
        mode = own if name == _OWN else _of_style(own, name)
    except ValueError as error:
        refusal = Refusal.of(error, subject.function, goes_on=False)
        return InMode(name, (refusal,), ("the step, which has no such mode",))
    rehearsals = Rehearsals(subject, mode, mesh)
    tracing = Tracing(subject.function, rehearsals.make, noted)
    tracing.run()
    once = {each.message: each for each in tracing.refusals.values()}
    refusals = tuple(sorted(once.values(), key=lambda each: (each.file, each.line)))
    known, made = InMode(name or _described(own), refusals, tuple(tracing.unseen)), tracing.found
    if refusals or made is None:
        return known
    anew = compiled_anew(made, rehearsals) if anew is None else anew
    whole, not_kept = gathered_whole(made.made.local), made.why or made.not_kept
    return replace(known, is_compiled=True, anew=anew, whole=whole, not_kept=not_kept)


def _described(mode: ParallelMode) -> str:
    """A mode as its style is called, else by its class."""
    return mode.split.style if isinstance(mode, DataParallel) else type(mode).__name__


def _of_style(own: ParallelMode, name: str) -> ParallelMode:
    """The step's mode with another style. Raises ``ValueError`` where its other options are of no such style."""
    if not isinstance(own, DataParallel):
        return DataParallel(name, inputs=own.inputs, input_batch_dim=own.input_batch_dim)  # type: ignore[arg-type]
    made = copy.copy(own)
    made.split = Split.check(name, False)
    Wire.check(own.wire.reduce_gradients, own.wire.reduce_dtype, own.wire.gather_dtype, made.split)
    Gathers.check(own.gathers.reshard, own.gathers.prefetch, own.gathers.limit, made.split, own.offload_policy)
    return made
