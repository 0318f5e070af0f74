"""Ranks of one machine that take each other for ranks of other hosts, so that they communicate by messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmd.ranks import local_ranks


@contextmanager
def messages(rank: int) -> Iterator[None]:
    """What is compiled in here communicates by messages: through shared memory nothing would be in flight."""
    host, local_ranks._host = local_ranks._host, lambda: f"host {rank}"
    try:
        yield
    finally:
        local_ranks._host = host
