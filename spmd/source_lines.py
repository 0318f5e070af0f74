"""The user's source line and module behind a frame or a traceback, for errors, dumps and reports."""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from types import FrameType, TracebackType

import torch

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, _PACKAGE + os.sep)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from ``frame`` outwards, that is neither torch's nor ours."""
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back
    return frame


def user_line(frame: FrameType | None) -> str:
    """``"train.py:12: loss = ..."`` for the innermost frame of the user's."""
    frame = user_frame(frame)
    return describe_line(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""


def describe_line(filename: str, line: int) -> str:
    """``"train.py:12: loss = ..."``."""
    return f"{os.path.basename(filename)}:{line}: {linecache.getline(filename, line).strip()}"


def user_place(traceback: TracebackType | None) -> tuple[str, int] | None:
    """(file, line) of the innermost frame of a traceback that is the user's."""
    place = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not filename.startswith(_INTERNAL) and not filename.startswith("<"):
            place = (filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place


def module_of(traceback: TracebackType | None, names: Mapping[int, str]) -> str:
    """The name of the innermost module whose method a traceback goes through, or nothing."""
    name = ""
    while traceback is not None:
        name = names.get(id(traceback.tb_frame.f_locals.get("self")), name)
        traceback = traceback.tb_next
    return name
