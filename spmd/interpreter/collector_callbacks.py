"""Callbacks of the garbage collector, which run at any time, also within the step: what they do is not the step's."""

from __future__ import annotations

import gc
import types


def callback_codes() -> list[types.CodeType]:
    """The code of each function and method in ``gc.callbacks``."""
    functions = [getattr(each, "__func__", each) for each in gc.callbacks]
    return [each.__code__ for each in functions if isinstance(each, types.FunctionType)]


def is_in_callback(frame: types.FrameType | None) -> bool:
    """Whether ``frame``, or one that called it, is such a callback."""
    codes = set(map(id, callback_codes()))  # code that is equal may be of another function
    while frame is not None and id(frame.f_code) not in codes:
        frame = frame.f_back
    return frame is not None
