"""Refuse a part of a step, in one place: the error is raised, unless a check has noted it before and goes on behind it.

A compiled step raises the first refusal, always. ``spmd check`` traces the step again with a listener, which lets the
refusals pass that it has noted: the trace takes a stand-in where it needs a value, and comes to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Listener(Protocol):
    """The check that listens while a step is traced."""

    def passes(self, error: Exception) -> bool:
        """Whether the trace goes on behind ``error``, which was noted before."""

    def chosen(self, error: Exception, answers: tuple[Any, ...]) -> Any:
        """The one of ``answers`` to what ``error`` passed for that the step gets in this trace."""

    def kept(self, error: Exception, make: Callable[[], Any]) -> Any:
        """Return what ``make`` did when a trace first came to ``error``: it can be taken once only."""


_listener: Listener | None = None


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a check listen, for the length of the context."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def is_heard() -> bool:
    """Whether a check listens."""
    return _listener is not None


def passes(error: Exception) -> bool:
    """Whether a check goes on behind ``error``; what is not passed has to be raised."""
    return _listener is not None and _listener.passes(error)


def refuse(kind: type[Exception], message: str) -> None:
    """Raise an error of this kind, unless a check goes on behind it."""
    _raise(kind(message))


def answer(error: Exception, *answers: T) -> T:
    """Raise ``error``, unless a check goes on behind it, with one of ``answers`` for the value that the step needs."""
    _raise(error)
    assert _listener is not None, "nothing passes without a check"
    found: T = _listener.chosen(error, answers)
    return found


class Question(Exception):
    """A step asks for a value on which it may branch: no refusal, but a check looks at both branches."""


def chosen(*answers: T) -> T | None:
    """The one of ``answers`` to a question that a check gives in this trace; None where none listens."""
    found: T | None = _listener.chosen(Question(), answers) if _listener is not None else None
    return found


def taken(error: Exception, make: Callable[[], T]) -> T:
    """Raise ``error``, unless a check goes on behind it, with what ``make`` returned in its first trace."""
    _raise(error)
    assert _listener is not None, "nothing passes without a check"
    found: T = _listener.kept(error, make)
    return found


def _raise(error: Exception) -> None:
    if not passes(error):
        raise error
