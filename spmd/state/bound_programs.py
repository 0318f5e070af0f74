"""The programs that hold views of live state between calls: what moves state releases them first."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from .background_reads import Span, span_of


class HoldsState(Protocol):
    """A program that is bound to state."""

    def release(self) -> None:
        """Hold on to no state; the next call binds anew."""

    def state(self) -> list[torch.Tensor]:
        """The state that it is bound to."""


_programs: weakref.WeakSet[HoldsState] = weakref.WeakSet()


def track(program: HoldsState) -> None:
    """Note a program that binds to state, as long as it lives."""
    _programs.add(program)


def release_all() -> None:
    """Let every program bind anew at its next call: the views that they hold keep storages alive."""
    for each in _programs:
        each.release()


def bound_spans() -> list[Span]:
    """The memory of the state that programs are bound to, in order, none within another."""
    found = sorted({span_of(tensor) for each in _programs for tensor in each.state() if tensor.numel()})
    spans: list[Span] = []
    for start, end in found:
        if not spans or end > spans[-1][1]:
            spans.append((start, end))
    return spans
