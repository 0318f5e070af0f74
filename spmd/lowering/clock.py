"""A clock that measures each node of a program while it runs: a tick between any two nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Ticks of one call, on the thread that computes. On an accelerator they are events in its current stream."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._ticks: list[Any] = []
        now, note = self._now(), self._ticks.append
        self.tick: Callable[[], None] = lambda: note(now())

    def _now(self) -> Callable[[], Any]:
        if self._device_type == "cpu":
            return time.perf_counter

        def event() -> torch.Event:
            made = torch.Event(self._device_type, enable_timing=True)
            made.record()
            return made

        return event

    def restart(self) -> None:
        """The first tick of a call."""
        self._ticks.clear()
        self.tick()

    def taken(self, names: Sequence[str]) -> Callable[[], dict[str, float]]:
        """Let go of the ticks; what is returned waits for the device, and gives seconds by the nodes' names."""
        ticks, self._ticks[:] = list(self._ticks), []
        return lambda: self._seconds(ticks, names)

    def _seconds(self, ticks: Sequence[Any], names: Sequence[str]) -> dict[str, float]:
        if self._device_type == "cpu":
            between = [end - start for start, end in pairwise(ticks)]
        else:
            ticks[-1].synchronize()
            between = [start.elapsed_time(end) / 1e3 for start, end in pairwise(ticks)]
        return dict(zip(names, between, strict=True))
