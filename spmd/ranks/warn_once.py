"""Warnings of a compilation that all ranks make together: of those that have one, the first gives it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..interpreter.source_lines import held_warnings, warn_user
from .connection import Connection
from .simulated import simulated


@contextmanager
def warn_once(what: str, connection: Connection | None) -> Iterator[None]:
    """Hold what the body warns of, then let the first rank that has a warning give it. All ranks call this together.

    If the body raises, all of them do, and the first one of all gives what it has.
    """
    try:
        with held_warnings() as held:
            yield
    except BaseException:
        _give(held if _place(connection) == 0 else [])
        raise
    texts = [] if connection is None else connection.all_gather_text(json.dumps(held), f"the warnings of {what}")
    earlier = {each for text in texts[: _place(connection)] for each in json.loads(text)}
    _give(held if texts or _place(connection) == 0 else [], earlier)


def _place(connection: Connection | None) -> int:
    """The number of this rank among those that compile together."""
    stands_for = simulated()
    if stands_for is not None:
        return stands_for.rank
    return 0 if connection is None else connection.members.ranks.index(dist.get_rank())


def _give(held: Iterable[str], earlier: Iterable[str] = ()) -> None:
    for each in dict.fromkeys(held):
        if each not in earlier:
            warn_user(each)
