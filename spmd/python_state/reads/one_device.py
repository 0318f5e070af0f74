"""The place in the world that a step asks for: that of the one device for which it is written.

Its losses, counts and rows are those of all ranks. So the number of ranks is 1, or a factor for each rank would be one
too many, and its own rows begin at 0. Who prints or logs is another question: ``get_rank() == 0`` is what it was.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.distributed import get_rank, get_world_size

from ..._torch import place_in_world
from ...interpreter.foreign_code import is_foreign_frame, is_importing

_SIZE: CodeType = get_world_size.__code__
_RANK: CodeType = get_rank.__code__


class OwnRank(int):
    """The rank in a step: 0 where a step computes or indexes with it, the process's own where it is compared or shown.

    A step takes its rows out of gathered ones by its rank, and there is one part of them. A tensor computes with it.
    """

    shown: int

    def __new__(cls, rank: int) -> OwnRank:
        """Make the rank of the process ``rank``."""
        made = super().__new__(cls, 0)
        made.shown = rank
        return made

    def __eq__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self.shown == behind_step(other)

    def __ne__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self.shown != behind_step(other)

    def __lt__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self.shown < behind_step(other)

    def __le__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self.shown <= behind_step(other)

    def __gt__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self.shown > behind_step(other)

    def __ge__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self.shown >= behind_step(other)

    def __hash__(self) -> int:
        return hash(self.shown)

    def __bool__(self) -> bool:
        return bool(self.shown)

    def __repr__(self) -> str:
        return repr(self.shown)

    def __format__(self, spec: str) -> str:
        return format(self.shown, spec)

    def __reduce__(self) -> Any:
        return int, (self.shown,)


def behind_step(value: Any) -> Any:
    """A value of a step as it is behind it, where a rank is the process's own."""
    return value.shown if isinstance(value, OwnRank) else value


@dataclass
class OneDevice:
    """The questions of a step about its place so far."""

    asked_size: bool = False


@contextmanager
def one_device() -> Iterator[OneDevice]:
    """Answer ``get_world_size`` and ``get_rank`` to the user's code in this thread, for the length of the context."""
    thread, place = threading.get_ident(), OneDevice()

    def is_asked(code: CodeType) -> bool:
        asks: FrameType = sys._getframe(3)  # behind the function that torch calls, and ours
        caller = asks.f_back if asks.f_code is code and threading.get_ident() == thread else None
        return not (caller is None or is_foreign_frame(caller) or is_importing(caller))

    def size(real: int) -> int:
        if not is_asked(_SIZE):
            return real
        place.asked_size = True
        return 1

    def rank(real: int) -> int:
        return OwnRank(real) if is_asked(_RANK) else real

    with place_in_world(size, rank):
        yield place
