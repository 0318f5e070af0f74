"""The point of a call at which state begins to change, on all ranks or on none.

Before it, a call that fails on any rank leaves the state of all as it was. All ranks meet there, so none begins to
write while another may still fail to compute its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from passes import RankMismatchError
from passes.runtime.answers import OtherAnswerError, first_other
from passes.runtime.host_memory import begin_reads, begin_writes
from passes.runtime.rooms import RoomExceededError, most_rows

from .._torch import DisableTorchFunctionSubclass
from ..interpreter.interrupts import hold_signals
from ..ranks.connection import Connection
from ..ranks.consensus import standing_of
from ..ranks.failures import StateIs

_PARTS = 1 << 20  # ranks exchange integers
_UNEQUAL = (
    "ranks found different values of a tensor on which the step branches, and would go different ways: expected it to "
    "be computed by ops that give the same on each rank. State is as it was before the call"
)


class Commit:
    """Called before the first write to state of each call; ``state`` says where the call stands."""

    def __init__(self) -> None:
        self.state = StateIs.BEFORE
        self._connection: Connection | None = None
        self._has_barrier = True
        self._cleared: Sequence[torch.Tensor] = ()

    def start(self, connection: Connection | None) -> None:
        """A call begins, on the ranks of ``connection``."""
        self.state, self._connection, self._has_barrier = StateIs.BEFORE, connection, True
        self._cleared = ()
        most_rows(), first_other()  # of what ran before, and was of no call
        begin_reads()

    def clear_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clear the gradients of ``parameters`` once state may be written: until then a call may fail, and leave them.

        Gradients that the call leaves behind are written from there on, so that they find the memory.
        """
        self._cleared = parameters

    def skip_barrier(self) -> None:
        """Need no barrier: the first write is of data that was complete on all ranks before this call."""
        self._has_barrier = False

    def wait_for_ranks(self) -> None:
        """Wait for all ranks in the middle of a call: they have read what this one had written for them."""
        if self._connection is not None:
            self._connection.barrier()

    def check_fit(self) -> None:
        """Raise, on all ranks, where another program has to run the call, which has changed nothing.

        ``RoomExceededError``: it has had more rows than there is room for. ``OtherAnswerError``: a value on which the
        step branches is another one than the program was traced for; ``RankMismatchError`` if it is on some ranks only.
        """
        self._check_rooms()
        self._check_answers()

    def _check_rooms(self) -> None:
        if self.state is not StateIs.BEFORE or (times := most_rows()) is None:
            return
        if self._connection is not None:  # ranks that sort rows by themselves know of their own alone
            most = self._connection.all_reduce_max((math.ceil(times * _PARTS), 0, 0), "the rows of experts")
            times = most[0] / _PARTS
        if times > 1:
            raise RoomExceededError(times)

    def _check_answers(self) -> None:
        if self.state is not StateIs.BEFORE or (number := first_other()) is None:
            return
        if self._connection is not None:
            most, negated, _ = self._connection.all_reduce_max((number, -number, 0), "what the step asks for")
            if most != -negated:
                self._connection.is_in_call = False  # all ranks know, and none has changed anything
                raise RankMismatchError(_UNEQUAL)
        if number >= 0:
            raise OtherAnswerError(number)

    def __call__(self) -> None:
        """Wait for all ranks, and for copies of state that are under way; state may be written from here on."""
        if self.state is StateIs.BEFORE:
            self.check_fit()
            begin_writes()
            hold_signals()  # behind the barrier other ranks end the call, and so does this one
            if self._connection is not None and self._has_barrier:
                self._connection.barrier()
            self.state = StateIs.MIXED
            with DisableTorchFunctionSubclass():  # of parameters that are split, which takes a hundred times as long
                for parameter in self._cleared:
                    parameter.grad = None
            self._cleared = ()

    def finish(self) -> None:
        """All that the call writes is written, and between calls the user may write to what it has copied."""
        begin_writes()
        if self.state is StateIs.MIXED:
            self.state = StateIs.AFTER
            standing_of(self._connection).updates += 1
