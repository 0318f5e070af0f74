"""Options of data parallelism that belong together, each group checked as a whole where the user gives it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import nn

from passes import AxisRole
from passes.errors import did_you_mean

from ..annotations.apply import check_reshard
from ..annotations.policies import OffloadPolicy
from ..ranks.axis_roles import Roles, axes_having
from ..stages.schedule_files import Actions
from ..stages.schedules import AUTO, SCHEDULES
from ..stages.stage_axis import STAGES_AXIS, Pipeline
from .base import RUNS, check_flag
from .shares import STYLES, Style

Reduce = Literal["once", "each"]
_REDUCE = get_args(Reduce)
_OF_PIPELINES = (AxisRole.BATCH, AxisRole.SHARD, AxisRole.TENSOR, STAGES_AXIS)  # the roles of axes beside stages
_WIRE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Split:
    """The state split over the axes of the role "shard": parameters by ``style``, or optimizer state alone."""

    style: Style
    shards_optimizer: bool

    @classmethod
    def check(cls, style: Any, shards_optimizer: Any) -> Split:
        """The style of a name. Raises ``TypeError`` or ``ValueError`` for another, or one that splits state already."""
        check_one_of("parallel_style", style, tuple(STYLES))
        check_flag("shard_optimizer", shards_optimizer)
        own, splits_state = STYLES[style]
        if shards_optimizer and own != "replicate":
            raise ValueError(
                f'expected shard_optimizer=True with parallel_style="replicate", got "{style}", which '
                "splits the optimizer's state together with its parameters"
            )
        return cls(own, shards_optimizer or splits_state)

    @property
    def needs_axis(self) -> bool:
        """Whether it makes no sense without an axis to split over."""
        return self.style == "fully_shard" or self.shards_optimizer

    def __str__(self) -> str:
        return "shard_optimizer=True" if self.shards_optimizer else f'"{self.style}"'


@dataclass(frozen=True)
class Wire:
    """Options of messages: how often gradients are reduced, and the dtypes of sent gradients and parameters."""

    reduce_gradients: Reduce
    reduce_dtype: torch.dtype | None
    gather_dtype: torch.dtype | None

    @classmethod
    def check(cls, reduce_gradients: Any, reduce_dtype: Any, gather_dtype: Any, split: Split) -> Wire:
        """Raises ``ValueError`` for another reduction or dtype, or a dtype of gathers where there are none."""
        check_one_of("reduce_gradients", reduce_gradients, _REDUCE)
        _check_dtype("reduce_dtype", reduce_dtype)
        _check_dtype("gather_dtype", gather_dtype)
        if gather_dtype is not None and split.style == "replicate" and not split.shards_optimizer:
            raise ValueError(
                f'expected no gather_dtype, got {gather_dtype}: "replicate" gathers no parameters, unless it has '
                "shard_optimizer=True"
            )
        return cls(reduce_gradients, reduce_dtype, gather_dtype)

    def options(self) -> dict[str, Any]:
        """The options of a plan, by name."""
        return {
            "reduce_gradients": self.reduce_gradients,
            "reduce_dtype": self.reduce_dtype,
            "gather_dtype": self.gather_dtype,
        }


@dataclass(frozen=True)
class Gathers:
    """When split parameters are gathered: once or again for backward, how far ahead, and how many units at once."""

    reshard: bool | int | None
    prefetch: tuple[int, int]
    limit: int | None

    @classmethod
    def check(cls, reshard: Any, prefetch: Any, limit: Any, split: Split, offload: OffloadPolicy | None) -> Gathers:
        """Raises ``ValueError`` for what is no such number, or where the style gathers nothing."""
        return cls(_check_reshard(reshard, split.style, offload), _check_prefetch(prefetch), _check_limit(limit))


def check_one_of(name: str, given: Any, allowed: Sequence[str], other: str = "") -> None:
    """Raise ``ValueError`` for what is none of the names that are allowed. ``other``: what else is."""
    if given not in allowed:
        listed = ", ".join(f'"{each}"' for each in allowed)
        raise ValueError(f"expected {name} to be one of {listed}{other}, got {given!r}{did_you_mean(given, allowed)}")


def _check_reshard(given: Any, style: Style, offload_policy: OffloadPolicy | None) -> bool | int | None:
    kept_together = given is not None and not isinstance(given, bool)
    if check_reshard(given) and style == "replicate" and (offload_policy is None or kept_together):
        raise ValueError(f'expected no reshard_after_forward={given}: "replicate" gathers no parameters')
    return check_reshard(given)


def _check_prefetch(given: Any) -> tuple[int, int]:
    match given:
        case (int(forward), int(backward)) if min(given) >= 0:
            return forward, backward
    raise ValueError(f"expected prefetch to be two numbers of units, for forward and for backward, got {given!r}")


def _check_limit(given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise ValueError(f"expected limit_gathers to be None or a number of units, 1 or more, got {given!r}")
    return given


def _check_dtype(name: str, given: Any) -> None:
    if given is not None and given not in _WIRE:
        listed = ", ".join(map(str, _WIRE))
        raise ValueError(f"expected {name} to be one of {listed} or None, got {given!r}")


def check_modules(given: Any) -> tuple[nn.Module, ...]:
    """Raise ``TypeError`` unless ``given``, the modules to ignore, is None or modules; returns them."""
    listed = () if given is None else given
    if not isinstance(listed, Iterable) or isinstance(listed, nn.Module):
        raise TypeError(f"expected ignored_modules to be a collection of modules, got {given!r}")
    listed = tuple(listed)
    if not all(isinstance(each, nn.Module) for each in listed):
        raise TypeError(f"expected ignored_modules to hold modules, got {listed!r}")
    return listed


def check_micro_batches(count: Any, defers: bool) -> int:
    """Raise ``TypeError`` or ``ValueError`` for no number of parts, or for options that exclude them; returns it.

    The most, where the step chooses.
    """
    count = RUNS[-1] if count == "auto" else count
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f'expected micro_batches to be an int or "auto", got {count!r}')
    if count < 1:
        raise ValueError(f"expected micro_batches to be 1 or more, got {count}")
    if count > 1 and defers:
        raise ValueError("expected no defer_updates=True with micro_batches: leave out one of them")
    return count


def check_reductions(reduce_gradients: Reduce, bits: int | None, stages: bool) -> None:
    """Raise ``ValueError`` for reductions of each gradient where sums are those of whole gradients."""
    if reduce_gradients == "each" and (bits is not None or stages):
        other = "stages" if stages else 'bits="same"'
        raise ValueError(
            f'expected reduce_gradients="once" with {other}: sums there are those of whole gradients, reduced once'
        )


def check_gather_parameters(given: Any, split: Split, micro_batches: int, stages: bool) -> bool | None:
    """Whether parameters are gathered once in a call; None: it is decided later.

    Raises ``ValueError`` for another value, and where nothing is gathered several times.
    """
    if given is None:
        return None
    check_one_of("gather_parameters", given, _REDUCE)
    if split.style == "replicate" or micro_batches == 1 or stages:
        raise ValueError(
            f'expected gather_parameters="{given}" with micro_batches= or bits=, with parameters that the style splits '
            "and without stages: nothing else gathers several times in a step"
        )
    return bool(given == "once")


def check_bits(
    bits: Any, virtual: Any, micro_batches: Any, accumulates_in: torch.dtype | None, defers: bool
) -> int | None:
    """The number of virtual parts for ``bits="same"``; None without. Raises ``ValueError`` for anything else."""
    if bits is None:
        return None
    if bits != "same":
        raise ValueError(f'expected bits to be "same" or None, got {bits!r}')
    if not isinstance(virtual, int) or virtual < 2 or virtual & (virtual - 1):
        raise ValueError(f"expected virtual, the parts of the global batch, to be 2, 4, 8, ..., got {virtual!r}")
    if micro_batches == "auto" or virtual % micro_batches:
        raise ValueError(
            f'expected micro_batches to divide virtual={virtual} with bits="same", whose parts it runs together, got '
            f"{micro_batches!r}"
        )
    if accumulates_in is not None:
        raise ValueError('expected no accumulate_dtype with bits="same": each rank would round its own sums')
    if defers:
        raise ValueError('expected no defer_updates=True with bits="same", which runs parts of the batch in turn')
    return virtual


def check_statistics(given: Any, micro_batches: int, stages: Any, bits: Any) -> Literal["per_micro_batch"] | None:
    """Raise ``ValueError`` for anything but "per_micro_batch" with micro-batches, or None; returns it."""
    if given not in ("per_micro_batch", None):
        raise ValueError(f'expected statistics to be "per_micro_batch" or None, got {given!r}')
    if given is not None and (micro_batches == 1 or bits is not None or stages is not None):
        raise ValueError('expected micro_batches=, and neither stages nor bits, with statistics="per_micro_batch"')
    return given  # type: ignore[no-any-return]


def check_accumulate_dtype(given: Any) -> torch.dtype | None:
    """Raise ``ValueError`` unless ``given`` is None or a dtype of floating point; returns it."""
    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise ValueError(f"expected accumulate_dtype to be a dtype of floating point or None, got {given!r}")
    return given


def check_pipeline(
    stages: Any, virtual: Any, schedule: Any, roles: Roles | None, micro_batches: int, offload: OffloadPolicy | None
) -> Pipeline | None:
    """Check the options of a pipeline: the division of a model over the axis of stages; None without one.

    Raises ``TypeError`` or ``ValueError`` for names of no modules, and for options that a pipeline excludes.
    """
    axes = axes_having(STAGES_AXIS, roles or {})
    if not axes:
        if stages is not None:
            raise ValueError(f'expected axes to give an axis the role "stages", over which stages={stages!r} divides')
        return None
    if len(axes) > 1:
        raise ValueError(f'expected one axis with the role "stages", got {", ".join(sorted(axes))}')
    others = [role for has in (roles or {}).values() for role in has if role not in _OF_PIPELINES]
    if others:
        raise ValueError(
            f'expected no axis with the role "{others[0]}" beside "stages": a pipeline does not split that'
        )
    if micro_batches < 2:
        raise ValueError(f'expected micro_batches of 2 or more with axes["stages"], got {micro_batches}')
    starts = None if stages is None or isinstance(stages, str) or not isinstance(stages, Iterable) else tuple(stages)
    if (starts is None and stages is not None) or not all(isinstance(each, str) for each in starts or ()):
        raise TypeError(f"expected stages to name the first module of each stage but the first one, got {stages!r}")
    actions = None
    if isinstance(schedule, PathLike) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        actions, schedule = Actions.read(schedule, micro_batches), "1f1b"
    check_one_of("schedule", schedule, (*SCHEDULES, AUTO))
    if offload is not None:
        raise ValueError("expected no offload_policy with stages: leave out one of them")
    if not isinstance(virtual, int) or isinstance(virtual, bool) or virtual < 2:
        raise ValueError(f"expected virtual_stages to be 2 or more, got {virtual!r}")
    if actions is not None:
        return Pipeline(starts, schedule, actions.virtual, actions)
    return Pipeline(starts, schedule, virtual if schedule in ("interleaved", AUTO) else 1)


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def check_memory(given: Any) -> int | None:
    """Bytes that are given as such or as text. Raises ``ValueError`` for anything else."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([KMG]i?B|B)", given.strip()) if isinstance(given, str) else None
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size < 1:
        unit = given.strip().lstrip("0123456789. ") if isinstance(given, str) else None
        hint = did_you_mean(unit, _UNITS) if unit not in _UNITS else ""
        raise ValueError(
            f'expected memory to be a number of bytes, or text such as "600MB" or "1.5GiB" in one of the units '
            f"{', '.join(_UNITS)}, got {given!r}{hint}"
        )
    return size
