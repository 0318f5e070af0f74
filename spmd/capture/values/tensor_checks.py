"""Checks of torch that raise where a tensor has a False, and their messages, while a step is traced.

``torch._check_tensor_all``, which transformers calls to compare placeholders of pictures with their features, reads a
value, and takes it for true while it is traced. Here it becomes an assertion, which each call makes. A message that
formats values is written before any are known: their places say so.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ..._torch import patched_tensor_checks, tensor_checks
from ...interpreter.positions import Span, called_by, encloses, position, span_of
from ...interpreter.source_lines import user_frame, user_line

_OF_LIBRARIES = {"transformers.utils.import_utils": "torch_compilable_check"}  # its argument ``msg`` is the message
_CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}


def tensor_checks_as_ops() -> AbstractContextManager[None]:
    """Let checks of tensors be assertions in the graph, for the length of a trace."""
    return patched_tensor_checks(_assert)


def _assert(error: type[Exception], condition: Tensor, message: Callable[[], str] | None = None) -> None:
    frame: FrameType | None = sys._getframe(1)
    helpers = {getattr(each, "__code__", None) for each in _of_libraries()}
    while frame is not None and (frame.f_code in helpers or user_frame(frame) is not frame):
        message = message or frame.f_locals.get("msg") if frame.f_code in helpers else message
        frame = frame.f_back
    text = str(message() if callable(message) else message or "expected all elements of a condition to be true")
    torch.ops.aten._assert_async.msg(condition.all(), f"{text} ({user_line(frame)})")


def writes_message(frame: FrameType) -> bool:
    """Whether the text that a frame makes is the message of a check: it returns it to one, or passes it to one.

    Which function takes the text follows from the positions of calls in the source.
    """
    if frame.f_back is not None and frame.f_back.f_code is _assert.__code__:
        return True
    here = position(frame.f_code, frame.f_lasti)
    if here is None:
        return False
    around = [
        each
        for each in dis.get_instructions(frame.f_code)
        if each.opname in _CALLS and encloses(span_of(each.positions), here)
    ]
    checks = {id(each) for each in _checks()}
    return any(id(_called(frame, span_of(each.positions))) in checks for each in around)


def _checks() -> list[Any]:
    return [*tensor_checks(), *_of_libraries()]


def _of_libraries() -> list[Any]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in _OF_LIBRARIES.items())
    return [each for each in found if each is not None]


def _called(frame: FrameType, call: Span | None) -> Any:
    """The function that a call names; None if it is something else."""
    owner, name = called_by(frame, call) if call is not None else (None, "")
    return getattr(owner, name, None) if owner is not None else frame.f_globals.get(name)
