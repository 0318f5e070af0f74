"""Streams and events of a GPU: the only file that touches real ones, as generated code calls them.

A program that runs on streams calls, of an event, ``record(stream)``, ``wait(stream)`` (work that is issued on the
stream later runs after the event) and ``synchronize()`` (the host waits). Nothing in here was ever run on a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_streams: dict[tuple[torch.device, str], Any] = {}  # of all programs: what one communicator does is in one stream


class DeviceStreams:
    """The streams of one device. Tests have others in its place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._used: list[Any] = []

    def current(self) -> Any:
        """The stream that the user computes on, which is the one that programs compute on."""
        return torch.cuda.current_stream(self.device)

    def stream(self, name: str) -> Any:
        """A stream that runs beside it, the same for all programs."""
        key = self.device, name
        if key not in _streams:
            _streams[key] = torch.cuda.Stream(self.device)
        self._used.append(_streams[key])
        return _streams[key]

    def join(self) -> None:
        """Let the stream that the user computes on come after all others, where a call fails half-way."""
        for stream in self._used:
            self.current().wait_stream(stream)

    def event(self) -> Any:
        """An event that measures no time."""
        return torch.cuda.Event()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue what runs in its body on ``stream``."""
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context
