"""A map from the bytes of a space to what is known of them, kept in as few intervals as differ."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Segments(Generic[T]):
    """Values by intervals of bytes: ``make()`` at first. ``copy`` makes a second one where an interval is divided."""

    def __init__(self, make: Callable[[], T], copy: Callable[[T], T]) -> None:
        self._copy = copy
        self._starts, self._values = [0], [make()]

    def over(self, start: int, end: int) -> Iterator[T]:
        """The values of the bytes from ``start`` to ``end``, and of no others: they may be changed."""
        self._divide(start)
        self._divide(end)
        yield from self._values[bisect_left(self._starts, start) : bisect_left(self._starts, end)]

    def replace(self, start: int, end: int, value: T) -> None:
        """Let one value hold for all bytes from ``start`` to ``end``, which ``over`` has visited."""
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        self._starts[first:last], self._values[first:last] = [start], [value]

    def all(self) -> Iterator[T]:
        """The values of all intervals."""
        yield from self._values

    def _divide(self, at: int) -> None:
        k = bisect_right(self._starts, at) - 1
        if self._starts[k] != at:
            self._starts.insert(k + 1, at)
            self._values.insert(k + 1, self._copy(self._values[k]))
