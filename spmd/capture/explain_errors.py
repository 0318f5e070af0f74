"""Explain what tracing raises: what the step does that no graph can hold, what to do instead, and the user's line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from traceback import extract_tb
from types import TracebackType
from typing import Any

import torch
from torch import nn

from passes import CaptureError, MemoryBudgetError, PlacementError, RankMismatchError, Role, SpmdError
from passes.unexpected_errors import explained

from .._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UnsupportedOperatorException,
)
from ..call.argument_logs import LogsFound
from ..call.inputs import BatchInput
from ..call.state import Arguments, submodules_of
from ..failed_ops import describe_failed_op, is_from_users_code
from ..interpreter.environment import is_set
from ..interpreter.source_lines import defined_at, module_of, source_at, user_locations, users_part
from ..unexpected_errors import is_users, mark_as_users
from .unsupported import FROM_OUTSIDE, OutsideTensor, Refused, UnknownShape

aten = torch.ops.aten

_FOR_USERS = (CaptureError, PlacementError, MemoryBudgetError, RankMismatchError)


@contextmanager
def explained_errors(
    function: Callable[..., Any], arguments: Arguments, inputs: Sequence[BatchInput] = ()
) -> Iterator[None]:
    """Raise ``CaptureError`` with an explanation for what torch raises; the user's own errors get a note instead."""
    try:
        with nullcontext() if _shows_all() else _without_log():
            yield
    except (SpmdError, LogsFound):
        raise
    except Exception as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        where = _describe_location(error.__traceback__, function, arguments)
        reason = _reason(error)
        if reason is not None and _depends_on_values(error) and _may_loop_over_experts(error.__traceback__, arguments):
            reason = f"{reason} {_FOR_EXPERTS}"
        if reason is None and not (is_users(error) or is_from_users_code(error)):
            raise explained(
                CaptureError, f"capture of {name}", error, f"{describe_failed_op(error)}\n    {where}"
            ) from error
        if reason is None:
            error.add_note(f"raised while spmd traced {name}; nothing was changed\n    {where}")
            if sizes := _describe_sizes(inputs):
                error.add_note(sizes)
            mark_as_users(error)
            raise
        refused = CaptureError(f"{name} cannot be traced into one graph: {reason}\n    {where}")
        if _shows_all():
            raise refused from error
        raise refused.with_traceback(users_part(error.__traceback__)) from None


def shorten_traceback(error: Exception) -> None:
    """Cut the traceback of an error to the user's frames, if it is of the user's own, or says what the user can do.

    ``SPMD_FULL_TRACEBACK=1`` keeps all.
    """
    if (is_users(error) or isinstance(error, _FOR_USERS)) and not _shows_all():
        error.__traceback__ = users_part(error.__traceback__)


def _shows_all() -> bool:
    return is_set("SPMD_FULL_TRACEBACK")


@contextmanager
def _without_log() -> Iterator[None]:
    """Let torch not log the failures of ops on fake tensors, which it raises as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _describe_location(traceback: TracebackType | None, function: Callable[..., Any], arguments: Arguments) -> str:
    """``"train.py:12 in model.head: loss = ..."``, or the line where the function is defined.

    Where a library raised that the step calls, its line is the second one.
    """
    locations = user_locations(traceback)
    if not locations:
        return defined_at(function)
    module = module_of(traceback, {id(module): name for name, module in submodules_of(arguments.modules)})
    where = f" in {module}" if module else ""
    lines = [f"{file}:{line}{where}: {source_at(file, line)}".removesuffix(": ") for file, line in locations]
    return "\n    called ".join(lines)


def _describe_sizes(inputs: Sequence[BatchInput]) -> str:
    """The shapes of arguments where they are others in the step, and which of these may be no rows; or nothing."""
    split = [each for each in inputs if tuple(each.shape) != tuple(each.value.shape)]
    if not split:
        return ""
    shapes = [f"{each.name}: {list(each.value.shape)} on this rank, {list(each.shape)} in the step" for each in split]
    text = f"sizes in the step are those of the global batch, of all ranks\n    {'; '.join(shapes)}"
    tables = [each.name for each in split if each.value.ndim == 1 and each.role is Role.BATCH and not each.is_named]
    named = ", ".join(f"'{name}': Replicate()" for name in tables)
    return f"{text}\n    what all rows share, such as class weights, is named: inputs={{{named}}}" if tables else text


def _depends_on_values(error: Exception) -> bool:
    """Whether the step asks for a value, or makes a result in a shape that depends on values."""
    by_value = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode, UnknownShape)
    return isinstance(error, by_value)


def _may_loop_over_experts(traceback: TracebackType | None, arguments: Arguments) -> bool:
    """Whether the module whose method raised may loop over experts: it has a list of modules, or stacked matrices."""
    modules = dict(submodules_of(arguments.modules))
    module = modules.get(module_of(traceback, {id(each): name for name, each in modules.items()}))
    if module is None:
        return False
    held = [*module.children(), *(each for child in module.children() for each in child.children())]
    stacked = any(parameter.ndim == 3 for each in (module, *held) for parameter in each.parameters(recurse=False))
    return stacked or any(isinstance(each, nn.ModuleList) for each in module.children())


_FOR_EXPERTS = (
    "If it loops over experts: compute each for all rows, and weigh its results by "
    "(weights * (chosen == e)).sum(-1, keepdim=True); or stack their weights, sort rows by expert and call "
    "torch.nn.functional.grouped_mm (docs/experts.md)."
)
_ALTERNATIVES = (
    "Select with torch.where instead of branching, return the tensor and look at it outside of the step, "
    "or replace the submodule through spmd.Override."
)
# Ops whose result has a shape that depends on values, each with what computes the same in known shapes.
_ALTERNATIVE_OF: dict[Any, str] = {
    aten.bincount: "Say how many classes there are: torch.bincount(x, minlength=classes).",
    aten.nonzero: "Keep all rows and weigh them with the mask, select with torch.where(mask, a, b), or return the "
    "mask and look at it outside of the step.",
    aten._pack_padded_sequence: "Run the RNN on the padded batch, which computes the same for all steps before a row "
    "ends; mask its outputs, and take a row's last one by index: out[torch.arange(n), lengths - 1].",
    aten.masked_select: "Keep all entries and weigh them with the mask: (x * mask).sum() / mask.sum().",
}
_AS_NUMBER = (
    "Return the tensor and look at it outside of the step, keep or log loss.item() rather than float(loss), branch on "
    "the tensor or on loss.item() (if loss > 3), select with torch.where, compute with functions of torch in place of "
    "those of math, or replace the submodule through spmd.Override."
)
BACKWARD = os.path.join("torch", "autograd", "graph.py")
_OF_STATE = (
    "A branch on 0-dim state compares the tensor itself (if self.count == 0, not self.count.item() or int(self.count))."
)
_MEMORY = (
    "it takes a tensor's memory out of torch. Return the tensor and look at it outside of the step, compute with "
    "functions of torch, or replace the submodule through spmd.Override."
)
_OUTSIDE = ("convert all Tensors to FakeTensors", "Mixing fake modes")
# By a part of the message, for errors whose type alone does not tell the reason.
_REASONS = {
    **dict.fromkeys(_OUTSIDE, FROM_OUTSIDE),
    "expected to contain only concrete integers": "it takes the value of a tensor for a size, but values are not known "
    f"while tracing. {_ALTERNATIVES}",
    "Couldn't swap": "it moves or converts a module, or makes one. Do so outside of the step.",
    "found at least two devices": "it computes with tensors on several devices. Move them to one before the step.",
    "SparseMeta": "it makes a sparse tensor, which cannot be split over ranks. Use dense ones (sparse=False).",
    "is not tracked with proxy": "it makes a nested tensor, whose shape depends on values. Pad, and pass a mask.",
    "SymFloat.__format__": f"it formats the value of a tensor, which is not known while tracing. {_ALTERNATIVES}",
    "SymInt.__format__": f"it formats the value of a tensor, which is not known while tracing. {_ALTERNATIVES}",
    "FakeTensor.__format__": f"it formats a tensor as text, which needs its value. {_ALTERNATIVES}",
    "numpy": _MEMORY,
    ".tolist()": _MEMORY,
    "data_ptr": _MEMORY,
    "storage": _MEMORY,
}


def is_from_outside(error: Exception) -> bool:
    """Whether the step met a tensor that is neither an argument nor state."""
    return isinstance(error, OutsideTensor) or any(part in str(error) for part in _OUTSIDE)


def _reason(error: Exception) -> str | None:
    """Explain in sentences what the step does and what to do instead; None for an error of the user's own."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode)):
        return _needs_a_value(error)
    if isinstance(error, DynamicOutputShapeException):
        alternative = _ALTERNATIVE_OF.get(error.func.overloadpacket, _ALTERNATIVES)
        return f"the shape of a result depends on values ({error.func}). {alternative}"
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} does not compute the shape of its result from shapes alone. {_ALTERNATIVES}"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], torch.Tensor):
        return (
            "it looks up a tensor in a dict, but while tracing, and after a step that splits parameters, other objects "
            "stand in their place. Look up by name."
        )
    text = str(error)
    return next((reason for part, reason in _REASONS.items() if part in text), None)


def _needs_a_value(error: Exception) -> str:
    frames = extract_tb(error.__traceback__)
    if torch.is_anomaly_check_nan_enabled() and any(frame.filename.endswith(BACKWARD) for frame in frames):
        return (
            "anomaly mode is on (torch.autograd.set_detect_anomaly), which looks for NaN in every gradient. Turn it "
            "off, call step.record(folder), and run `spmd replay folder`, which names the op that made the first NaN."
        )
    condition = getattr(error, "cond", None)
    if condition is not None and not (condition.is_Relational or condition.is_Boolean):  # such as ``float(loss)``
        return f"it needs the value of a tensor as a number, which is not known while tracing. {_AS_NUMBER}"
    return f"it needs the value of a tensor, which is not known while tracing. {_OF_STATE} {_ALTERNATIVES}"
