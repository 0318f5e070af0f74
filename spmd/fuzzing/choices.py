"""``Choices``: numbers that decide what a step is made of. They are drawn apart from what they are read as.

So a part can be left out, or a number made smaller, and all others still mean what they meant: files shrink well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Gene:
    """Numbers for one part of a step, read one after another; zeros follow. The first option is the simplest."""

    numbers: Sequence[int] = ()
    _read: int = 0

    def of(self, options: Sequence[T]) -> T:
        """The option that the next number stands for."""
        number = self.numbers[self._read] if self._read < len(self.numbers) else 0
        self._read += 1
        return options[number % len(options)]

    def rarely(self, option: T, otherwise: T) -> T:
        """``option`` in one of four steps."""
        return self.of([otherwise, otherwise, otherwise, option])


Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """The numbers of each part; the fields stand in the order of the file that is written from them."""

    data: Numbers = ()
    statements: tuple[Numbers, ...] = ()
    changes: tuple[Numbers, ...] = ()  # to the model, before it is trained
    loss: Numbers = ()
    training: Numbers = ()
    optimizer: Numbers = ()
    mode: Numbers = ()
    passes: Numbers = ()

    def simpler(self) -> Iterator[Choices]:
        """These choices, then without what most often makes a step that raises by itself."""
        yield self
        yield replace(self, changes=())
        yield replace(self, changes=(), training=())
        yield replace(self, changes=(), training=(), optimizer=())
