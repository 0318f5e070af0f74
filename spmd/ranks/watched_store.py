"""A store in which a rank that waits for what the others write can notice that one of them has failed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]


class WatchedStore(Store):
    """``store``, but before a wait for keys, ``wait_for(keys)`` is called, which may raise.

    gloo waits in C++, deaf to all else, until every rank of a new group has written its address; with this store it
    waits in Python.
    """

    def __init__(self, store: Any, wait_for: Callable[[list[str]], None]) -> None:
        super().__init__()
        self._store, self._wait_for = store, wait_for

    def set(self, key: str, value: Any) -> None:
        """Write ``value`` under ``key``."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of ``key``, once it is there."""
        self._wait_for([key])
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there; ``wait_for`` says how long."""
        self._wait_for(keys)

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""
        return bool(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number under ``key``."""
        return int(self._store.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; returns whether it was there."""
        return bool(self._store.delete_key(key))
