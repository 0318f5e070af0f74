"""The memory that the programs of one step compute in: one arena a device, kept from call to call.

What other ranks of the host look at lies in an arena of its own. It is written to again in the next call only, which
begins with an exchange among all ranks (``consensus.py``): by then all have read what they wanted.

A step runs one program at a time, and nothing that lives on after a call is in an arena, so that all programs of a step
share it. It is as large as the largest of them needs.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol
from weakref import WeakSet

import torch

from passes.runtime.arena import reserve


class User(Protocol):
    """What is bound to an arena, and can be told to let go of it."""

    def release(self) -> None:
        """Let go; a later call binds anew."""


class Arenas:
    """Arenas by device."""

    def __init__(self) -> None:
        self.users: WeakSet[User] = WeakSet()
        self._arenas: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def reserve(self, size: int, device: torch.device, shared: bool = False) -> torch.Tensor:
        """At least ``size`` bytes. Where there are not so many yet, all users let go of the old arena first."""
        kind = device, shared
        if device.type == "cpu":
            _keep_what_is_freed()
        if kind not in self._arenas or self._arenas[kind].numel() < size:
            for user in list(self.users):
                user.release()
            self._arenas.pop(kind, None)
            self._arenas[kind] = reserve(size, device, shared)
        return self._arenas[kind]

    def release(self) -> None:
        """Free all of it; the next call reserves anew."""
        for user in list(self.users):
            user.release()
        self._arenas.clear()


@cache
def _keep_what_is_freed() -> None:
    """Let the process keep memory that ops without an out variant free (attention, layer norm), for the next call.

    glibc gives large blocks back to the kernel, and what it gives back costs a page fault for each 4 KiB when it is
    taken again: 1,800 a step for a GPT of width 256, 6 of 108 ms. How large is large follows the blocks that were
    freed, up to 32 MiB (``M_MMAP_THRESHOLD`` in mallopt(3)); so one such block is freed, without ever being touched.
    """
    torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)
