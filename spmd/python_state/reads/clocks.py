"""Clocks in a step: each call of a program would get the time at which it was traced, so asking one is refused."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from passes import CaptureError

from ...call.refusals import refuse
from ...interpreter.collector_callbacks import is_in_callback
from ...interpreter.foreign_code import is_foreign_frame
from ...interpreter.source_lines import user_lines

_NAMES = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_CLOCKS: dict[Any, str] = {getattr(time, name): name for each in _NAMES for name in (each, f"{each}_ns")}


@contextmanager
def refused_clocks() -> Iterator[None]:
    """Let the clocks of ``time`` raise ``CaptureError`` in the user's code, for the length of the context."""
    clocks = {name: getattr(time, name) for name in _CLOCKS.values()}  # a test may have put others there
    for name, clock in clocks.items():
        setattr(time, name, _refusing(name, clock))
    try:
        yield
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)


def is_clock(value: Any) -> bool:
    """Whether ``value`` is a clock of ``time``, as ``from time import perf_counter`` puts into a namespace."""
    return isinstance(value, types.BuiltinFunctionType) and value in _CLOCKS


def refusing(clock: Callable[[], Any]) -> Callable[[], Any]:
    """Make a stand-in for ``clock`` that raises if the step asks it while this thread traces."""
    return _refusing(_CLOCKS[clock], clock)


def _refusing(name: str, clock: Callable[[], Any]) -> Callable[[], Any]:
    thread = threading.get_ident()

    def ask() -> Any:
        caller = sys._getframe(1)
        if threading.get_ident() != thread or is_foreign_frame(caller) or is_in_callback(caller):
            return clock()
        refuse(
            CaptureError,
            f"the step asks time.{name}(), and each call of its program would get the time at which it was traced: "
            f"measure, and draw progress bars, outside of the step\n    {user_lines(caller)}",
        )

    return ask
