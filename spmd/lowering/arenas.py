"""Arenas: the memory that the programs of one step compute in, one per device, reused by every call.

Values that the other ranks of the host read are in an arena that they map. What they may still read when a call ends is
written over in the next call, which begins with a barrier among all ranks (``consensus.py``): all have read it by then.

A step runs one program at a time, and no value in an arena outlives a call, so all programs of a step share the arenas.
Each is as large as the largest program needs. So it is with what runs of a call hand on, from one to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Protocol
from weakref import WeakSet

import torch

from passes.runtime.arena import reserve

from .gradient_memory import GradientMemory


class User(Protocol):
    """Anything that is bound to an arena and can release it."""

    def release(self) -> None:
        """Drop all references to the arena; a later call binds anew."""


class Arenas:
    """Arenas by device. ``keep_freed``: let the process keep what ops allocate beside them, for the next call."""

    def __init__(self, keep_freed: bool = False) -> None:
        self.keep_freed = keep_freed
        self.users: WeakSet[User] = WeakSet()
        self._arenas: dict[tuple[torch.device, bool], torch.Tensor] = {}
        self._handed_on: list[torch.Tensor] = []
        self.gradients = GradientMemory()

    def reserve(self, size: int, device: torch.device, shared: bool = False) -> torch.Tensor:
        """At least ``size`` bytes. All users release an arena that is too small before it is replaced."""
        kind = device, shared
        if self.keep_freed and device.type == "cpu":
            _keep_freed_memory()
        if kind not in self._arenas or self._arenas[kind].numel() < size:
            for user in list(self.users):
                user.release()
            self._arenas.pop(kind, None)
            self._arenas[kind] = reserve(size, device, shared)
        return self._arenas[kind]

    def handed_on(self, new: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Memory like ``new``, by any key: what another program of the step hands on between its runs, where equal."""
        free, found = list(self._handed_on), dict[int, torch.Tensor]()
        for key, tensor in new.items():
            like = (tensor.shape, tensor.dtype, tensor.device)
            at = next((k for k, each in enumerate(free) if (each.shape, each.dtype, each.device) == like), None)
            found[key] = tensor if at is None else free.pop(at)
            self._handed_on += [tensor] if at is None else []
        return found

    def release(self) -> None:
        """Free all of it; the next call reserves anew."""
        for user in list(self.users):
            user.release()
        self._arenas.clear()
        self._handed_on.clear()
        self.gradients.release()


@cache
def _keep_freed_memory() -> None:
    """Let the process keep memory that ops without an out variant free (attention, layer norm), for the next call.

    glibc returns large blocks to the kernel, and then the next allocation costs a page fault for each 4 KiB: 1,800 a
    step for a GPT of width 256, 6 of 108 ms. How large is large follows the blocks that were freed, up to 32 MiB
    (``M_MMAP_THRESHOLD`` in mallopt(3)); so one such block is freed, without ever being touched. That holds for all
    of the process, so it is the user's choice.
    """
    torch.empty((32 << 20) - (1 << 16), dtype=torch.uint8)
