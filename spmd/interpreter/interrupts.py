"""Signals that a Python handler answers, maybe by raising, where that must not happen.

While a step is compiled, Ctrl-C and others are held until one of these runs: the user's code, a function of ours that
is marked for it (``interruptible``), or a place that asks for it (``answer_interrupt``). For our code replaces parts of
the user's objects and puts them back, which must not end halfway. And torch's C++ code calls Python in places that must
not raise, for example to ask a symbolic number what it is, or a fake tensor for its device: the process ends with a
segmentation fault, or is aborted (seen in 2.13). Nor is what ranks count together interrupted halfway.

Once the other ranks may end a call without this one, this one has to end it, too: signals that arrive from there on
are held until the call is over (``hold_signals``).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # ``signal`` makes an enum of each number: a tenth of a millisecond
import _thread
import os
import signal
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch

import passes

from .collector_callbacks import is_in_callback

_AGAIN = 0.002  # seconds until a held interrupt is sent again
_OURS = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), passes.__file__))
_UNSAFE = (os.path.dirname(torch.__file__) + os.sep, weakref.__file__)  # what a weak reference calls raises nowhere
_ASKED = ("__getattribute__", "__getattr__")  # by torch's C++ code, which drops what they raise
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))

_NUMBERS = tuple(map(int, signal.valid_signals()))

Function = TypeVar("Function", bound=Callable[..., Any])
_interruptible = dict[int, Any]()  # code of functions, by id: code that is equal may be of another function
_held = list[tuple[int, Any]]()  # signals, each with its handler, which who answers takes from here


def interruptible(function: Function) -> Function:
    """Let an interrupt raise in ``function`` and in what of ours it calls: there is nothing to be put back."""
    code = function.__code__
    _interruptible[id(code)] = code
    return function


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold signals until the user's code runs, or one that is ``interruptible``: their handlers get them then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers, is_active = _handlers(), True

    def interrupted(number: int, frame: FrameType | None) -> None:
        if not is_active or not _is_unsafe(frame):
            handlers[number](number, frame)
        elif all(number != held for held, _ in _held):
            _held.append((number, handlers[number]))
            _thread.start_new_thread(_send_again, ())  # takes no lock that the interrupted code may have

    try:
        for number in handlers:
            signal.signal(number, interrupted)
        yield
    finally:
        is_active = False  # should a handler raise below, those of the others are called by this one from now on
        for number, handler in handlers.items():
            if signal.getsignal(number) is interrupted:  # the step may have set another
                signal.signal(number, handler)


def answer_interrupt() -> None:
    """Let a signal that is held be handled here, in a call that may raise anything."""
    if _held and threading.current_thread() is threading.main_thread():
        for number, handler in _taken():
            handler(number, sys._getframe(1))


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Let the handlers of signals that arrive meanwhile run after the body, which has to be short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = _handlers()
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


class _HeldSignals:
    """The signals that arrive in a part of a call, and their handlers. The second of a kind is not held."""

    def __init__(self) -> None:
        self._handlers = dict[int, Any]()
        self._arrived = list[int]()
        self._is_over = False
        self._handler = self._arrives  # one object, by which ``end`` knows that nobody has set another

    def begin(self) -> None:
        """Hold signals from now on."""
        if not self._handlers:
            self._handlers = _handlers()
            for number in self._handlers:
                _signal.signal(number, self._handler)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or number in self._arrived:
            self._handlers[number](number, frame)
        else:
            self._arrived.append(number)

    def answer(self) -> None:
        """Let the handlers of what has arrived run, all of them, also if some raise."""
        with ExitStack() as answers:
            while self._arrived:
                number = self._arrived.pop()
                answers.callback(self._handlers[number], number, sys._getframe(1))

    def end(self) -> None:
        """Hold nothing any more, and answer."""
        self._is_over = True  # should a handler raise below, those of the others are called by ours from now on
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) is self._handler:
                    _signal.signal(number, handler)
        finally:
            self.answer()


_in_call: _HeldSignals | None = None  # of the call that the main thread makes


@contextmanager
def answering_after() -> Iterator[None]:
    """Let signals that arrive from ``hold_signals()`` on, in the body, be answered when that is over."""
    global _in_call
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outer, _in_call = _in_call, _HeldSignals()
    try:
        yield
    finally:
        held, _in_call = _in_call, outer
        held.end()


def hold_signals() -> None:
    """Hold signals that arrive from now on until the call is over; the second of a kind is answered at once."""
    if _in_call is not None and threading.current_thread() is threading.main_thread():
        _in_call.begin()


def answer_held_signals() -> None:
    """Answer those that were held since then, in a wait that may take long and may be given up."""
    if _in_call is not None and threading.current_thread() is threading.main_thread():
        _in_call.answer()


def _handlers() -> dict[int, Any]:
    """The handlers in Python, by signal."""
    return {number: handler for number in _NUMBERS if callable(handler := _signal.getsignal(number))}


def _is_unsafe(frame: FrameType | None) -> bool:
    """Whether torch runs, or code of ours that is not marked, or a library that they call, or errors may be ignored."""
    if is_in_callback(frame):
        return True
    is_ours = False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            is_ours = True
            if id(code) in _interruptible:
                return False
            if code.co_name in _ASKED:
                return True
        elif code.co_filename.startswith(_UNSAFE):
            return True
        elif not code.co_filename.startswith((*_LIBRARIES, "<")):  # generated code has names such as <string>
            break
        frame = frame.f_back
    return is_ours


def _send_again() -> None:
    time.sleep(_AGAIN)
    for number, _ in _taken():
        os.kill(os.getpid(), number)


def _taken() -> list[tuple[int, Any]]:
    """The signal that was held first, which nobody else takes then; none if another has."""
    try:
        return [_held.pop(0)]
    except IndexError:
        return []
