"""The pool on two hosts, and what becomes of tests where such hosts cannot be made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.peers.network import NoNetworkError, two_hosts

from .pool import Ranks

NEEDED = "SPMD_TESTS_NEED_HOSTS"  # set where tests may not skip


@contextmanager
def made_on_two_hosts() -> Iterator[Ranks]:
    """A pool whose ranks live on two hosts. Raises ``NoNetworkError`` where these cannot be made."""
    with two_hosts() as network:
        pool = Ranks(network)
        try:
            yield pool
        finally:
            pool.close()


@contextmanager
def pool_on_two_hosts() -> Iterator[Ranks]:
    """The same for tests, which skip where there is none, or fail if hosts are needed."""
    try:
        with made_on_two_hosts() as pool:
            yield pool
    except NoNetworkError as missing:
        if os.environ.get(NEEDED):
            pytest.fail(f"{NEEDED} is set, but {missing}")
        pytest.skip(str(missing))
