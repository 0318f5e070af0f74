"""Signals that a Python handler answers, maybe by raising, where that must not happen.

While a step is compiled, Ctrl-C is held as long as torch's code runs: its C++ code calls Python in places that must not
raise, for example to ask a symbolic number what it is while it parses the arguments of an op: the process ends with a
segmentation fault, or is aborted (seen in 2.13). And what ranks count together is not interrupted halfway.
"""

from __future__ import annotations

import _thread
import os
import signal
import sysconfig
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import torch

import passes

from .collector_callbacks import is_in_callback

_AGAIN = 0.002  # seconds until a held interrupt is sent again
_OURS = (os.path.dirname(__file__) + os.sep, os.path.dirname(passes.__file__) + os.sep)
_UNSAFE = (os.path.dirname(torch.__file__) + os.sep, weakref.__file__)  # what a weak reference calls raises nowhere
_ASKED = ("__getattribute__", "__getattr__")  # by torch's C++ code, which drops what they raise
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold ``SIGINT`` while the body is in torch's code; the user's handler gets it as soon as ours or theirs runs."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        if _is_unsafe(frame):
            _thread.start_new_thread(_send_again, (number,))  # takes no lock that the interrupted code may have
        else:
            handler(number, frame)

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupted:  # the step may have set another
            signal.signal(signal.SIGINT, handler)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let the handlers of signals that arrive meanwhile run after the body, which has to be short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: handler for number, handler in known.items() if callable(handler)}
    arrived: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda *given: arrived.append(given))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with ExitStack() as answers:  # all of them, also if some raise
            for number, frame in reversed(arrived):
                answers.callback(handlers[number], number, frame)


def _is_unsafe(frame: FrameType | None) -> bool:
    """Whether torch runs, or a library that torch has called, or code whose errors C code may ignore."""
    if is_in_callback(frame):
        return True
    is_ours = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            is_ours = True
            if frame.f_code.co_name in _ASKED:
                return True
        elif is_ours:
            return False
        elif file.startswith(_UNSAFE):
            return True
        elif not file.startswith((*_LIBRARIES, "<")):  # generated code has names such as <string>
            return False
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    time.sleep(_AGAIN)
    os.kill(os.getpid(), number)
