"""All ranks of the world do the same work in steps: what one of them raises in a step, all raise.

Ranks communicate in the gloo groups that compiled steps use, whatever the user's backend is. An error is passed on as
text in the exchange that ends a step, so connections stay open, and a run that could not save goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from passes import SpmdError
from passes.runtime.peer_connection import PeerLostError

from .._torch import get_proxy_mode
from ..ranks.connection import Connection, connect
from ..ranks.consensus import MeshRanks, notify, standing_of
from ..ranks.failures import StateIs, described
from ..ranks.standing import Standing

# The kinds of errors that are passed on as what they are; all others become SpmdError.
_KINDS = {kind.__name__: kind for kind in (TypeError, ValueError, FileNotFoundError, PermissionError, SpmdError)}


Exchange = Callable[[str], list[str]]  # from this rank's text to those of all ranks


class Together:
    """The ranks of the world while they are at ``what``. ``state``: what becomes of state if they do not end it."""

    def __init__(self, what: str, connection: Connection | None, exchange: Exchange | None = None) -> None:
        """``exchange``: how the ranks communicate, if not in the connection."""
        self.what, self._connection = what, connection
        if connection is not None:
            self._exchange = exchange or partial(connection.all_gather_text, what=what)
        self.rank = dist.get_rank() if connection is not None else 0
        self.size = len(connection.members.ranks) if connection is not None else 1
        self.state = StateIs.BEFORE
        self.agreed: BaseException | None = None  # what all ranks raise

    @property
    def group(self) -> Any:
        """The gloo group of all ranks; None where there is one rank only."""
        return self._connection.groups[0] if self._connection is not None else None

    def watched_store(self, name: str) -> AbstractContextManager[Any]:
        """Open the connection's store, in which each rank makes one gloo group."""
        assert self._connection is not None, "there are several ranks"
        return self._connection.watched_store(name)

    @property
    def timeout(self) -> float:
        """Seconds that ranks may be apart."""
        return self._connection.timeout if self._connection is not None else 0.0

    @property
    def standing(self) -> Standing:
        """The standing of this rank's state; in a world of one it is alone."""
        return standing_of(self._connection)

    def run(self, work: Callable[[], Any]) -> list[Any]:
        """Let every rank do its ``work``, without communication; returns what each returned, in order, as from JSON.

        Raises on all ranks, with the same message, if it raised on any.
        """
        error: BaseException | None = None
        result = None
        try:
            result = work()
        except Exception as raised:
            if self._connection is None and not isinstance(raised, OSError):
                raise
            error = raised
        failure = None if error is None else [type(error).__name__, str(error) or described(error)]
        if self._connection is None:
            self._raise_if_any([failure], error)
            return [result]
        texts = self._exchange(json.dumps([failure, result]))
        gathered = [json.loads(text) for text in texts]
        self._raise_if_any([failure for failure, _ in gathered], error)
        return [result for _, result in gathered]

    def aside(self, exchange: Exchange) -> Together:
        """The same ranks, which communicate by ``exchange`` while others use the connection."""
        return Together(self.what, self._connection, exchange)

    def communicate(self, work: Callable[[], None]) -> None:
        """Let every rank do its part of what DCP does together. What DCP passes on to all ranks, all raise.

        Any other error is raised here alone, in the middle of an exchange, and the connection has to be closed.
        """
        try:
            work()
        except CheckpointException as raised:
            causes = [_cause(rank, cause[0]) for rank, cause in sorted(raised.failures.items())]
            self.agreed = SpmdError("; ".join(causes))
            raise self.agreed from next(iter(raised.failures.values()))[0]
        except RuntimeError as error:
            if self._connection is None:
                raise
            raise PeerLostError(str(error)) from error  # of gloo, since DCP passes on what ranks raise

    def first(self, work: Callable[[], Any]) -> Any:
        """Let the first rank do this ``work``, and return on all ranks what it returned."""
        return self.run(lambda: work() if self.rank == 0 else None)[0]

    def fail(self, error: Exception) -> NoReturn:
        """Raise what all ranks raise."""
        self.agreed = error
        raise error

    def _raise_if_any(self, failures: list[Any], own: BaseException | None) -> None:
        """Raise the first failure, of the kind that it had; the message names its ranks unless all have it."""
        messages = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
        if not messages:
            return
        kind, message = next(iter(messages.values()))
        equal = [rank for rank, failure in messages.items() if failure == [kind, message]]
        if kind not in _KINDS:
            message = f"{self.what} failed: {kind}: {message}"
        if len(equal) < len(failures):
            message = f"{message} (on rank {', '.join(map(str, equal))})"
        self.agreed = _KINDS.get(kind, SpmdError)(message)
        raise self.agreed from own


@contextmanager
def together(what: str, *, restores_state: bool = False) -> Iterator[Together]:
    """Connect all ranks for ``what``, and let all of them raise if the body ends on one of them.

    ``restores_state``: state that a failed call left partly updated is no hindrance.
    """
    if get_proxy_mode() is not None:
        raise SpmdError(f"{what} was called for inside of a compiled step: do so between its calls")
    ranks, connection = MeshRanks.of(None, None), None
    if ranks.groups:
        connection = connect(ranks.groups, ranks.members, ranks.timeout, what, to_recover=restores_state)
    work = Together(what, connection)
    differed = connection is not None and (
        any(each.partly for each in connection.standings) or len({each.updates for each in connection.standings}) > 1
    )
    try:
        yield work
    except BaseException as error:  # an interrupt, too: the others must not wait
        if error is not work.agreed or work.state is StateIs.MIXED:
            notify(connection, what, error, work.state)
        raise
    if connection is not None and differed:
        connection.close()  # the next call connects anew, and compares how the state of all ranks stands now


def _cause(rank: int, error: BaseException) -> str:
    return f"rank {rank} raised {described(error)}"
