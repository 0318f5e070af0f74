"""Agreement between ranks at compile time, through the store of the process group and never through collectives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from passes import RankMismatchError

from ._torch import default_store

TIMEOUT = timedelta(seconds=120)  # by how much ranks may be apart when they have compiled the same step
_SHOWN = 20_000  # characters of a text that are compared for the message; all of it is compared by hash


@contextmanager
def together(what: str) -> Iterator[Agreement]:
    """Compile ``what`` on all ranks or on none: each attempt is one exchange, whether it goes well or not.

    Inside, ``agree`` waits for the others. A rank that fails before it tells them, so that none waits for it.
    """
    agreement = Agreement(what)
    try:
        yield agreement
    except Exception as error:
        agreement.fail(error)
        raise


class Agreement:
    """One attempt to compile."""

    def __init__(self, what: str) -> None:
        self.what, self._told = what, False

    def agree(self, text: str, proposed: list[int]) -> list[int]:
        """Wait for all ranks and return what rank 0 ``proposed``.

        Raises ``RankMismatchError`` if a rank failed, did not come, or came with another ``text``.
        """
        if not _can_talk():
            return proposed
        self._told = True
        digest = hashlib.sha256(text.encode()).hexdigest()
        theirs = [json.loads(told) for told in _exchange(json.dumps(["ready", proposed, digest, text[:_SHOWN]]))]
        for rank, (state, told, *_) in enumerate(theirs):
            if state == "failed":
                raise RankMismatchError(f"{self.what} was not compiled on any rank, since rank {rank} failed: {told}")
        different = [rank for rank, other in enumerate(theirs) if other[2] != theirs[0][2]]
        if different:
            raise RankMismatchError(
                f"expected {self.what} to be the same on all ranks, but rank {different[0]} differs from rank 0:\n"
                f"{_first_difference(theirs[0][3], theirs[different[0]][3])}"
            )
        return list(theirs[0][1])

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank does not come."""
        if not self._told and _can_talk():
            self._told = True
            _tell(json.dumps(["failed", f"{type(error).__name__}: {error}"[:_SHOWN]]))


def _can_talk() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"


def _tell(value: str) -> list[str]:
    """Put this rank's value into the store; returns the keys under which all ranks put theirs."""
    store, rank = default_store(), dist.get_rank()
    number = store.add(f"spmd/exchanges/{rank}", 1)  # counted in the store, so that a new process group starts anew
    keys = [f"spmd/exchange {number}/{k}" for k in range(dist.get_world_size())]
    store.set(keys[rank], value)
    return keys


def _exchange(value: str) -> list[str]:
    """Every rank's value, in rank order."""
    keys, store = _tell(value), default_store()
    try:
        store.wait(keys, TIMEOUT)
    except Exception as error:
        raise RankMismatchError(
            f"rank {dist.get_rank()} waited {TIMEOUT.total_seconds():.0f} s for all ranks to compile, but not all came"
        ) from error
    return [store.get(key).decode() for key in keys]


def _first_difference(a: str, b: str) -> str:
    for line, other in zip(a.splitlines(), b.splitlines(), strict=False):
        if line != other:
            return f"  rank 0: {line}\n  other:  {other}"
    return f"  rank 0: {a[-80:]}\n  other:  {b[-80:]}"
