"""Failures: what a rank reports to the others when its call did not end well, and the sentence that they raise.

A rank puts its ``Failure`` into the store before it closes its connections, so a rank that finds them closed can read
why.
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from .members import Members
from .standing import ALONE, Standing

_PATIENCE = 2.0  # seconds for other ranks to report why they closed their connections
_SHOWN = 2_000  # characters of what a rank raised


class StateIs(enum.Enum):
    """The state of one rank (parameters, buffers, optimizer state) after a call that failed."""

    BEFORE = "as before the call"
    MIXED = "partly updated"
    AFTER = "as after the call"


@dataclass(frozen=True)
class Failure:
    """A call that failed on one rank. ``lost``: only because it lost the connection to another.

    ``call``: its number among those that began in the connection. ``updates`` and ``partly``: see ``Standing``.
    """

    rank: int
    error: str
    state: str
    lost: bool
    call: int = 0
    updates: int = 0
    partly: str = ""

    @classmethod
    def of(cls, error: BaseException, state: StateIs, lost: bool, call: int = 0, at: Standing = ALONE) -> Failure:
        """The failure of this rank's call, and how its state stands."""
        return cls(dist.get_rank(), described(error)[:_SHOWN], state.value, lost, call, at.updates, at.partly[:_SHOWN])

    @property
    def standing(self) -> Standing:
        """The standing of the rank's state: its updates, and whether one was made in part."""
        return Standing(self.updates, self.partly)


class FailureBoard:
    """The failures of the ranks of one connection, in the store under ``name``."""

    def __init__(self, store: Any, name: str, members: Members) -> None:
        self._store, self._name, self._members = store, name, members

    def publish(self, failure: Failure) -> None:
        """Let the other ranks read a failure of this one; one per connection."""
        self._store.set(self._key(failure.rank), json.dumps(asdict(failure)))
        self._store.set(f"{self._name}/failed", "")

    def has_any(self) -> bool:
        """Whether some rank has failed."""
        return bool(self._store.check([f"{self._name}/failed"]))

    def read(self) -> list[Failure]:
        """The failures so far."""
        keys = [self._key(member) for member in self._members.ranks]
        return [Failure(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]

    def wait(self) -> list[Failure]:
        """The failures of all ranks, or of those that report within two seconds; causes before consequences."""
        deadline = time.monotonic() + _PATIENCE
        while len(found := self.read()) < len(self._members.ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        return sorted(found, key=lambda failure: failure.lost)

    def explain(self, what: str, found: Sequence[Failure]) -> str:
        """The sentence for a call that failed because of another rank: which rank, what, and whether state is whole."""
        silent = [member for member in self._members.ranks if member not in {failure.rank for failure in found}]
        causes = {failure.rank: f"raised {failure.error}" for failure in found if not failure.lost}
        if not causes.keys() - {dist.get_rank()}:
            causes |= dict.fromkeys(silent, "has ended, or does not answer")
        states = [f"on rank {failure.rank} {failure.state}" for failure in sorted(found, key=lambda each: each.rank)]
        states += [f"on rank {member} unknown" for member in silent]
        why = "; ".join(f"{self._at(rank)}rank {rank} {cause}" for rank, cause in causes.items())
        why = why or f"the connection along {self._members.axes_to(self._members.ranks)} was lost"
        look = f". Look at the output of rank {', '.join(map(str, causes))}" if causes else ""
        return f"{what} did not end on all ranks: {why}. State is {', '.join(states)}{look}"

    def _at(self, rank: int) -> str:
        axes = self._members.axes_to([rank])
        return f"along {axes}, " if axes else ""

    def _key(self, member: int) -> str:
        return f"{self._name}/failure/{member}"


def described(error: BaseException) -> str:
    """The type and message of an error."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
