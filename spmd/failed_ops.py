"""Ops that raise while the step is traced: whether they would by themselves, which tells a user's mistake from ours."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from ._torch import FakeTensor, disable_modes, tree_flatten
from .unexpected_errors import deepest_frame, is_ours

_OP = "_spmd_op"  # the attribute of an error that has the ``FailedOp``
# Functions of ours that the user's calls run through: what is raised right below them is not their error.
_PASS_ON = {
    "__torch_dispatch__",
    "__torch_function__",
    "__getattribute__",
    "cast_and_call",  # of mixed_precision.py, with the next one
    "run",
    "checked",  # of optimizers.py: zero_grad, and step
    "watched",
}
_TORCH = os.path.dirname(torch.__file__)
_TRACERS = tuple(os.path.join(_TORCH, folder) + os.sep for folder in ("fx", "_functorch", "_subclasses"))
_NO_MISTAKES = (AssertionError, AttributeError, KeyError, NameError)  # what no op raises for wrong arguments


@dataclass(frozen=True)
class FailedOp:
    """``is_refused``: it raises for these arguments without our trace, too."""

    name: str
    is_refused: bool


def note_op(error: Exception, func: Any, args: Any, kwargs: Any) -> None:
    """Note on an error which op raised it; an op on nothing but fakes is run once more, outside of the trace."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    if _OP in vars(error) or not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        return
    try:
        with disable_modes():
            func(*args, **kwargs)
    except Exception:
        is_refused = True
    else:
        is_refused = False
    vars(error)[_OP] = FailedOp(str(func), is_refused)


def describe_failed_op(error: Exception) -> str:
    """``" at aten.mm.default"``, or nothing where the error is of no op."""
    op: FailedOp | None = vars(error).get(_OP)
    return f" at {op.name}" if op else ""


def is_from_users_code(error: Exception) -> bool:
    """Whether the step would raise an error without us, as far as can be seen."""
    op: FailedOp | None = vars(error).get(_OP)
    if op is not None:
        return op.is_refused
    frame = deepest_frame(error)
    if is_ours(frame):
        return frame.f_code.co_name in _PASS_ON
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    is_tracers = traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_TRACERS)
    return not (is_tracers and isinstance(error, _NO_MISTAKES))
