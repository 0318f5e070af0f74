"""The source positions of a frame's instructions: which calls enclose which, and what they call."""

from __future__ import annotations

import dis
from types import CodeType, FrameType
from typing import Any

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
_LOCALS = {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}

Span = tuple[tuple[int, int], tuple[int, int]]
"""(line, column) of the start and of the end."""


def position(code: CodeType, offset: int) -> Span | None:
    """The place of an instruction in the source."""
    return next((span_of(each.positions) for each in dis.get_instructions(code) if each.offset == offset), None)


def span_of(positions: Any) -> Span | None:
    """The same as ``Span``; None where nothing is known."""
    if positions is None or None in positions:
        return None
    return (positions.lineno, positions.col_offset), (positions.end_lineno, positions.end_col_offset)


def encloses(outer: Span | None, inner: Span) -> bool:
    """Whether a part of the source is a part of another one."""
    return outer is not None and outer[0] <= inner[0] and inner[1] <= outer[1] and outer != inner


def called_by(frame: FrameType, call: Span) -> tuple[Any, str]:
    """The function that a call names: (the object that has it, its name); the object is None for a global.

    The object, for a local variable the frame's, is found through names and attributes; nothing is called for it.
    """
    found: Any = None
    owner, name = None, ""
    for each in dis.get_instructions(frame.f_code):
        span = span_of(each.positions)
        if span is None or span[0] != call[0] or span == call:
            continue
        if each.opname in _GLOBALS:
            owner, name, found = None, each.argval, frame.f_globals.get(each.argval)
        elif each.opname in _LOCALS:
            owner, name, found = frame.f_locals, each.argval, frame.f_locals.get(each.argval)
        elif each.opname == "LOAD_CONST" and isinstance(each.argval, str):
            owner, name, found = None, "", each.argval
        elif each.opname in _ATTRIBUTES:
            owner, name, found = found, each.argval, getattr(found, each.argval, None)
    return owner, name
