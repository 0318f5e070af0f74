"""The user's source line and module behind a frame or a traceback, for errors, dumps and reports."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any

import torch

import passes

from .foreign_code import is_foreign_frame, is_library_file

_PACKAGES = [os.path.dirname(os.path.abspath(file)) + os.sep for file in (os.path.dirname(__file__), passes.__file__)]
_BETWEEN = (contextlib.__file__, functools.__file__)
_held: ContextVar[list[str] | None] = ContextVar("held_warnings", default=None)
_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, *_PACKAGES)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``frame`` outwards, that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def held_warnings() -> Iterator[list[str]]:
    """Collect what ``warn_user`` has to say in the body, instead of warning."""
    held = list[str]()
    before = _held.set(held)
    try:
        yield held
    finally:
        _held.reset(before)


def warn_user(message: str) -> None:
    """Warn at the innermost line of the user's own code, else of a library, however many frames of ours are between."""
    held = _held.get()
    if held is not None:
        held.append(message)
        return
    frame: FrameType | None = sys._getframe(1)
    level, innermost = 2, 0
    while frame is not None:
        if not _is_between(frame):
            innermost = innermost or level
            if not is_library_file(frame.f_code.co_filename):
                innermost = level
                break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=innermost or level)


def _is_between(frame: FrameType) -> bool:
    """Whether a frame is torch's, ours, or code through which these call the user's, such as what torch generates."""
    file = frame.f_code.co_filename
    return is_foreign_frame(frame) if file == "<string>" else file.startswith((*_INTERNAL, *_BETWEEN))


def user_line(frame: FrameType | None) -> str:
    """``"train.py:12: loss = ..."`` for the innermost frame of the user's code, or nothing."""
    frame = user_frame(frame)
    if frame is None:
        return ""
    filename, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(filename)}:{line}: {source_at(filename, line)}"


def user_lines(frame: FrameType | None) -> str:
    """``user_line`` of the innermost frame that is of no library, and behind it that of a library that it calls."""
    innermost = own = user_frame(frame)
    while own is not None and is_library_file(own.f_code.co_filename):
        own = user_frame(own.f_back)
    return "\n    called ".join(dict.fromkeys(user_line(each) for each in (own or innermost, innermost)))


def source_at(filename: str, line: int) -> str:
    """The text of one line of source."""
    return linecache.getline(filename, line).strip()


def user_locations(traceback: TracebackType | None) -> list[tuple[str, int]]:
    """(file, line) of the innermost frame of a traceback that is the user's; after it, that of a library it calls."""
    own: tuple[str, int] | None = None
    innermost: tuple[str, int] | None = None
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not (is_foreign_frame(traceback.tb_frame) or file.startswith(_INTERNAL)):
            innermost = (file, traceback.tb_lineno)
            own = own if is_library_file(innermost[0]) else innermost
        traceback = traceback.tb_next
    return list(dict.fromkeys(each for each in (own, innermost) if each is not None))


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that are the user's, down to the innermost one; None if there are none."""
    if traceback is None:
        return None
    inner, frame = users_part(traceback.tb_next), traceback.tb_frame
    if _is_between(frame):
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


def named_at(function: Callable[..., Any]) -> str:
    """``"halved (train.py:12)"``: a function by its name, with the line where it, or what it calls, is defined."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
