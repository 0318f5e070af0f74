"""The work of a user's step: captured once for each number of ranks along "tensor", with the bytes of its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import OutputKind, Program, Role

from ..modes.data_parallel import DataParallel
from ..step import CompiledStep
from .capture import partitioned, sections
from .estimate import State, Work
from .kernels import Section
from .shorten import shortened

_SAMPLED = 2  # ranks of the batch's axis: enough to see which values are split over it


@dataclass(frozen=True)
class StepWork:
    """One step as it is given. ``rows``: of its batch; ``tokens``: of a row, where an argument has rows of integers."""

    work: Work
    rows: int
    tokens: int
    notes: tuple[str, ...]


def step_work(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensor: int = 1) -> StepWork:
    """Capture ``step`` with the whole batch in ``args``, on ``tensor`` ranks along the axis that its mode names.

    Raises ``TypeError`` for what is no compiled step, ``ValueError`` for a mode whose layouts are not searched.
    """
    step, args = unbound(step, args)
    given = given_mode(step)
    batch, other = axes_of(given)
    mesh = {batch: _SAMPLED, **({other: tensor} if other else {})}

    def mode(device_mesh: DeviceMesh) -> DataParallel:
        return DataParallel(
            "replicate",
            mesh=device_mesh,
            axes=given.axes,
            params=given.params,
            inputs=given.inputs,
            input_batch_dim=given.input_batch_dim,
            mp_policy=given.mp_policy,
        )

    try:
        fewer, named, counts = shortened(step, args, kwargs)
        local = partitioned(step, mode, fewer, named, mesh)
    except Exception:  # it counts its blocks, or names each of them
        counts, local = {}, partitioned(step, mode, args, kwargs, mesh)
    rows = [i for i in local.inputs if i.role is Role.BATCH and i.shape]
    if not rows:
        raise ValueError("expected a step with a batch among its arguments, of which ranks can have different rows")
    shape = rows[0].shape
    dim = given.input_batch_dim
    integers = [prod(i.shape) // i.shape[dim] for i in rows if i.dtype == torch.int64 and len(i.shape) > 1]
    plain, fused = (_counted(sections(local, fused), counts) for fused in (False, True))
    work = Work(plain, fused, _state(local, given))
    return StepWork(work, shape[dim] // _SAMPLED, max(integers, default=1), tuple(local.notes))


def _counted(found: list[Section], counts: Mapping[str, int]) -> list[Section]:
    """The sections, with as many blocks as the whole model has."""
    return [replace(each, count=counts.get(each.name, each.count)) for each in found]


def given_mode(step: Any) -> DataParallel:
    """The mode of a step. Raises ``ValueError`` unless it is ``DataParallel``."""
    mode = step.options.mode
    if not isinstance(mode, DataParallel):
        raise ValueError(f"expected a step with DataParallel, whose layouts a plan compares, got {mode!r}")
    return mode


def axes_of(mode: DataParallel) -> tuple[str, str | None]:
    """The names of the batch's axis, and of the one along which ``params`` splits parameters, if it names one."""
    named = [axis for placement in mode.params.values() if isinstance(placement, Mapping) for axis in placement]
    stated = (mode.axes or {}).get("batch", "dp")
    batch = stated if isinstance(stated, str) else next(iter(stated))
    others = sorted({axis for axis in named if axis != batch})
    if len(others) > 1:
        raise ValueError(f"expected params to split parameters over one axis beside {batch!r}, got {others}")
    return batch, others[0] if others else None


def unbound(step: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A step, and its arguments with the instance where it is a method."""
    if isinstance(step, MethodType):
        step, args = step.__func__, (step.__self__, *args)
    if not isinstance(step, CompiledStep):
        raise TypeError(f"expected a step that spmd.compile made, got {step!r}: decorate it with @spmd.compile")
    return step, args


def _state(local: Program, given: DataParallel) -> State:
    """Bytes for each number: of parameters, of gradients like them, of the optimizer's state, and of what is sent."""
    parameters = [i for i in local.inputs if i.role is Role.PARAMETER]
    held = [(i.shape, i.dtype) for i in local.inputs if i.role is Role.OPTIMIZER_STATE]
    made = [o for o in local.outputs if o.role is Role.OPTIMIZER_STATE and o.kind is not OutputKind.UPDATE]
    count = sum(prod(i.shape) for i in parameters) or 1
    weight = sum(prod(i.shape) * _size(i.dtype) for i in parameters) / count
    optimizer = sum(prod(shape) * _size(dtype) for shape, dtype in [*held, *((o.shape, o.dtype) for o in made)]) / count
    policy = given.mp_policy.param_dtype if given.mp_policy is not None else None
    narrow = given.wire.gather_dtype or policy
    return State(weight, weight, optimizer, _size(narrow) if narrow is not None else None)


def _size(dtype: torch.dtype | None) -> int:
    return dtype.itemsize if dtype is not None else 8
