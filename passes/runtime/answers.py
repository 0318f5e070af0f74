"""Answers: what a step did with the value of a tensor while it was traced, which a call compares before it writes.

Where Python asks whether a tensor is true, a trace takes an answer and goes on; its program holds for that answer. An
op notes where a call's value is another one, and the call looks before it writes to state: another program of the step
runs it then. What a program computes for the wrong answer is dropped.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..errors import SpmdError

NAMESPACE = "spmd_answers"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("asked(Tensor value, int number, bool answer) -> Tensor")


class OtherAnswerError(SpmdError):
    """The value that the step asks for at its question of this ``number`` is another one; all ranks know."""

    def __init__(self, number: int) -> None:
        super().__init__(f"expected the value that the program was traced for at question {number}")
        self.number = number


class _Noted(threading.local):
    def __init__(self) -> None:
        self.values: list[tuple[int, Tensor, bool]] = []  # one for each op that ran: number, value and answer


_noted = _Noted()


def _copy(value: Tensor, number: int, answer: bool) -> Tensor:
    return value.clone()


def _asked(value: Tensor, number: int, answer: bool) -> Tensor:
    """``value``, a bool of 0 dims; notes it beside the answer that the program was traced for."""
    found = _copy(value, number, answer)
    _noted.values.append((number, found, answer))
    return found


_library.impl("asked", _asked, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::asked", _copy, lib=_library)
asked = getattr(torch.ops, NAMESPACE).asked.default


def first_other() -> int | None:
    """The first question since this was last called whose value is another one; -1 if none is, None if none ran."""
    noted, _noted.values = _noted.values, []
    if not noted:
        return None
    return min((number for number, value, answer in noted if bool(value) is not answer), default=-1)
