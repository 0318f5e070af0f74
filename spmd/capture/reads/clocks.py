"""Clocks in a step: each call of a program would get the time at which it was traced, so asking one is refused."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from passes import CaptureError

from ...foreign_code import is_foreign_file
from ...source_lines import user_line

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")


@contextmanager
def refused_clocks() -> Iterator[None]:
    """Let the clocks of ``time`` raise ``CaptureError`` in the user's code, for the length of the context."""
    clocks = {name: getattr(time, name) for each in _CLOCKS for name in (each, f"{each}_ns")}
    for name, clock in clocks.items():
        setattr(time, name, _refusing(name, clock, threading.get_ident()))
    try:
        yield
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)


def _refusing(name: str, clock: Callable[[], Any], thread: int) -> Callable[[], Any]:
    def ask() -> Any:
        caller = sys._getframe(1)
        if threading.get_ident() != thread or is_foreign_file(caller.f_code.co_filename):
            return clock()
        raise CaptureError(
            f"the step asks time.{name}(), and each call of its program would get the time at which it was traced: "
            f"measure outside of the step\n    {user_line(caller)}"
        )

    return ask
