"""Patience: wait for other ranks as long as their process group would, and say meanwhile who is missing.

A rank that is late writes a checkpoint, or reads a cold disk; it is waited for. One that failed is not: every wait is
cut into slices, and between two of them ``check`` raises if another rank has failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..interpreter.interrupts import answer_held_signals, interruptible
from .members import Members

_SLICE = 1.0  # seconds
_POLL = 0.01  # seconds between two looks into the store
_FIRST, _AGAIN = 10.0, 60.0  # seconds after which rank 0, or the first rank that waits, says who is missing
PATIENT = 60.0  # the same where ranks wait for one that works for them
_log = logging.getLogger("spmd")


class LateError(TimeoutError):
    """Some ranks did not come in time."""


@dataclass(frozen=True)
class Patience:
    """One wait of the ``members`` of a mesh for each other.

    ``name``: of this wait, equal on all ranks, and used once. ``seconds``: how long to wait at most. ``store``: where
    ranks leave word that they wait. ``check``: raises if another rank has failed.
    """

    what: str
    name: str
    members: Members
    seconds: float
    store: Any
    check: Callable[[], None]
    first_line: float | None = None

    def wait(self, is_over: Callable[[float], bool]) -> None:
        """Wait until ``is_over(seconds)``, which takes at most these seconds, returns True.

        Raises ``LateError`` when the time is over, with the ranks that are missing, and what ``check`` raises.
        """
        start = time.monotonic()
        if is_over(min(_SLICE, self.seconds)):
            return
        self.store.set(self._key(dist.get_rank()), "")
        try:
            self._wait_on(is_over, start)
        finally:
            with suppress(Exception):  # a store that is gone needs no tidying
                self.store.delete_key(self._key(dist.get_rank()))

    @interruptible
    def _wait_on(self, is_over: Callable[[float], bool], start: float) -> None:
        next_line = self.first_line or _FIRST
        while True:
            answer_held_signals()  # ranks that have not come by now may never come
            self.check()
            waited = time.monotonic() - start
            if waited >= self.seconds:
                raise LateError(f"waited {self.seconds:g} s for {self._missing()} to come to {self.what}")
            if waited >= next_line:
                next_line = _AGAIN * (waited // _AGAIN + 1)
                self._log_missing(waited)
            if is_over(min(_SLICE, self.seconds - waited)):
                return

    def wait_for_keys(self, keys: list[str]) -> None:
        """Wait until all ``keys`` of the store are there."""
        self.wait(lambda seconds: self.are_there(keys, seconds))

    def are_there(self, keys: list[str], seconds: float) -> bool:
        """Wait at most ``seconds``; returns whether all ``keys`` are there."""
        deadline = time.monotonic() + seconds
        while not (found := self.store.check(keys)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return bool(found)

    def _log_missing(self, waited: float) -> None:
        """Log who is missing, on the first rank that waits."""
        rank, ranks = dist.get_rank(), self.members.ranks
        if not any(self._waits(member) for member in ranks[: ranks.index(rank)]):
            _log.warning(
                "rank %d has waited %.0f s for %s to come to %s; it waits %g s at most (compile(timeout=...))",
                *(rank, waited, self._missing(), self.what, self.seconds),
            )

    def _missing(self) -> str:
        missing = [member for member in self.members.ranks if not self._waits(member)]
        shown = ", ".join(map(str, missing[:8])) + ", ..." * (len(missing) > 8)
        axes = self.members.axes_to(missing)
        return f"rank{'s' * (len(missing) > 1)} {shown}" + (f" (along {axes})" if axes else "")

    def _waits(self, member: int) -> bool:
        return bool(self.store.check([self._key(member)]))

    def _key(self, member: int) -> str:
        return f"{self.name}/waiting/{member}"
