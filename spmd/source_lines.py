"""The user's source line and module behind a frame or a traceback, for errors, dumps and reports."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch

import passes

from .foreign_code import is_foreign_file

_PACKAGES = [os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, passes.__file__)]
_BETWEEN = (contextlib.__file__, functools.__file__, "<string>")  # in the latter torch.fx has code that it generates
_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, *_PACKAGES)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``frame`` outwards, that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return frame


def warn_user(message: str) -> None:
    """Warn at the innermost line of the user's code, however many frames of ours lie in between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_INTERNAL, *_BETWEEN)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def user_line(frame: FrameType | None) -> str:
    """``"train.py:12: loss = ..."`` for the innermost frame of the user's code, or nothing."""
    frame = user_frame(frame)
    if frame is None:
        return ""
    filename, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(filename)}:{line}: {source_at(filename, line)}"


def source_at(filename: str, line: int) -> str:
    """The text of one line of source."""
    return linecache.getline(filename, line).strip()


def user_location(traceback: TracebackType | None) -> tuple[str, int] | None:
    """(file, line) of the innermost frame of a traceback that is the user's."""
    location = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not is_foreign_file(filename):
            location = (filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return location


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that are the user's, down to the innermost one; None if there are none."""
    if traceback is None:
        return None
    inner, frame = users_part(traceback.tb_next), traceback.tb_frame
    if frame.f_code.co_filename.startswith((*_INTERNAL, *_BETWEEN)):
        return inner
    return TracebackType(inner, frame, traceback.tb_lasti, traceback.tb_lineno)


def module_of(traceback: TracebackType | None, names: Mapping[int, str]) -> str:
    """The name of the innermost module whose method is in a traceback, or nothing. ``names`` are by id."""
    name = ""
    while traceback is not None:
        name = names.get(id(traceback.tb_frame.f_locals.get("self")), name)
        traceback = traceback.tb_next
    return name


def defined_at(function: Callable[..., Any]) -> str:
    """``"train.py:12"``: the line where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
