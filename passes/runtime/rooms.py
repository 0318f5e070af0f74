"""Room for rows whose number a call decides: an op notes where there are more, and a call looks before it writes.

The op returns its operand, so that whatever reads rows waits for it. Ranks that sort rows by themselves note unequal
numbers, and exchange them before they write. What a program computes after it has noted more
rows than there is room for is wrong, and has to be dropped.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ..errors import SpmdError

NAMESPACE = "spmd_rooms"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("within(Tensor ends, int each, int rows, int room) -> Tensor")


class RoomExceededError(SpmdError):
    """Some rank was to have ``times`` the rows that its program has room for; all ranks know."""

    def __init__(self, times: float) -> None:
        super().__init__(f"expected room for all rows of a rank's experts, got {times:.2f} times as many")
        self.times = times


class _Noted(threading.local):
    def __init__(self) -> None:
        self.times: list[Tensor] = []  # most rows of a rank, by the room for them: one for each op that ran


_noted = _Noted()


def _copy(ends: Tensor, each: int, rows: int, room: int) -> Tensor:
    return ends.clone()


def _within(ends: Tensor, each: int, rows: int, room: int) -> Tensor:
    """``ends``, at which groups end among ``rows``; notes the most rows of a rank, which has ``each`` groups."""
    stops = ends[each - 1 :: each].clone()
    stops[-1] = rows  # those behind the last group are the last rank's
    _noted.times.append(stops.diff(prepend=stops.new_zeros(1)).amax() / room)
    return _copy(ends, each, rows, room)


_library.impl("within", _within, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::within", _copy, lib=_library)
within = getattr(torch.ops, NAMESPACE).within.default


def most_rows() -> float | None:
    """The most rows of a rank since this was last asked, as a multiple of the room for them; None if no op ran."""
    noted, _noted.times = _noted.times, []
    return max(map(float, noted), default=None)
