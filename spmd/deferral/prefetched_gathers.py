"""Gathers that a call starts for the next one, of parameters that lie sharded in between.

Nobody has to finish them: state is true at every moment, and what they bring is used only if what they sent equals what
would be sent now, byte by byte, on all ranks. Else the whole program runs, which gathers anew.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from passes import Program
from passes.ir.collectives import WAIT
from passes.prefetch import Prefetched

from ..lowering.arenas import Arenas
from ..lowering.lower import lower
from ..lowering.regions import CompiledRegions
from ..ranks.equal_values import bytes_of
from ..state.commit import Commit

_IN_VAIN = 8  # calls in a row, on which no more is started for the next one

Execute = Callable[[Sequence[Any]], list[Any]]


@dataclass(eq=False)
class InFlight:
    """What the last call of a step has started, whichever of its programs that ran: ``values``, and what was ``sent``.

    ``of``: what was gathered, and how; programs of other sizes gather the same. ``by``: the id of what started it.
    ``in_vain``: the calls in a row that found nothing of use. Ranks count the same calls: after one that failed on some
    rank, all compile, and begin anew.
    """

    of: str = ""
    values: list[torch.Tensor] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    in_vain: int = 0
    by: int = 0

    def __post_init__(self) -> None:
        _all.add(self)

    def drop(self) -> None:
        """Let go of it, once it has arrived: until then it is being written."""
        values, self.of, self.values, self.sent, self.by = self.values, "", [], [], 0
        for value in values:
            with suppress(RuntimeError):  # the connection is closed, and the next call says why
                WAIT(value)


class PrefetchedGathers:
    """The programs that use what the call before has started, lowered, beside the whole program of the same step."""

    def __init__(
        self,
        programs: Prefetched,
        in_flight: InFlight,
        arenas: Arenas,
        commit: Commit,
        regions: CompiledRegions | None = None,
    ) -> None:
        self.programs, self.in_flight = programs, in_flight
        in_flight.in_vain = 0
        self._sent, self._start, self._steady = (
            lower(each, arenas, commit, regions) for each in (programs.sent, programs.start, programs.steady)
        )
        state = [(each.name, each.shape, each.dtype) for each in programs.start.inputs if each.role.is_state]
        moved = [(each.shape, each.dtype) for each in programs.start.outputs]
        self._of = f"{state}\n{moved}\n{programs.start.code}"
        self._values = len(programs.start.collectives())
        self._results = len(programs.steady.outputs) - len(programs.start.outputs)
        self.used_prefetched = False  # whether the last call used what was in flight

    @property
    def steady(self) -> Program:
        """The program of all calls but the first."""
        return self.programs.steady

    @property
    def is_started(self) -> bool:
        """Whether gathers as those of the program are in flight."""
        return self.in_flight.of == self._of

    def is_current(self, inputs: Sequence[Any]) -> bool:
        """Whether what is in flight is what the program would gather now; of ``inputs``, only state counts."""
        return self.is_started and all(map(_equal_bytes, self.in_flight.sent, self._sent(inputs)))

    def of_call(self, whole: Execute, is_stale: bool) -> Execute:
        """What runs a call. ``whole`` runs the program that gathers itself, which is chosen where a rank ``is_stale``.

        All ranks make the same choice, so that they have the same gathers in flight.
        """
        flight = self.in_flight

        def run(inputs: Sequence[Any]) -> list[Any]:
            self.used_prefetched = not is_stale
            if is_stale:
                flight.drop()
                flight.in_vain += 1
                returned = whole(inputs)
                if flight.in_vain <= _IN_VAIN:
                    self._keep(self._start(inputs))
                return returned
            values, flight.of, flight.values, flight.sent, flight.in_vain = flight.values, "", [], [], 0
            taken = [[value] for value in values]
            del values
            returned = self._steady([*inputs, *taken])
            self._keep(returned[self._results :])
            return returned[: self._results]

        return run

    def _keep(self, started: list[torch.Tensor]) -> None:
        flight = self.in_flight
        flight.by = id(self)
        flight.of, flight.values, flight.sent = self._of, started[: self._values], started[self._values :]

    def close(self) -> None:
        """Drop what is in flight, all references to state, and the generated code."""
        if self.in_flight.by == id(self):
            self.in_flight.drop()
        for each in (self._sent, self._start, self._steady):
            each.close_code()


def _drop_all() -> None:
    for each in _all:
        each.drop()


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bits: a NaN equals itself, and -0.0 is not 0.0."""
    flat = [bytes_of(each) for each in (one, other)]
    if all(each.numel() % 8 == 0 and each.storage_offset() % 8 == 0 for each in flat):
        flat = [each.view(torch.int64) for each in flat]  # seven times as fast
    return one.shape == other.shape and torch.equal(*flat)


_all: weakref.WeakSet[InFlight] = weakref.WeakSet()
atexit.register(_drop_all)  # torch warns of what nobody waited for
