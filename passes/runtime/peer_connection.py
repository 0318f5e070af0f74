"""A connection to one local rank: messages over a Unix socket, and that rank's segments mapped into this process.

A message is four integers: a publication (its number, segment, offset and length in bytes), an arrival at a barrier
(three integers), the release of a segment, or an abort. The file of a segment travels with the first message about it,
so that nothing has a name that could be left behind. A message passes through the kernel, so its receiver reads what
its sender wrote before.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import warnings
from collections import deque
from contextlib import suppress
from mmap import PROT_READ, mmap
from typing import Any

import torch

from .segments import EMPTY, Segment, SharedBytes

Triple = tuple[int, int, int]

_MESSAGE = struct.Struct("<qqqq")
_FILE = struct.Struct("i")
_ANCILLARY = socket.CMSG_LEN(_FILE.size)
# Seconds for which a rank looks again before it sleeps: ranks in step come within them, and to wake up takes longer.
_SPIN = 100e-6
# In the place of a publication's length:
_RELEASE = -1  # the segment is closed
_ARRIVAL = -2  # the rank has arrived at a barrier, with the three integers before
_ABORT = -3  # the rank has given up on the others; its first integer is 1 if it was waiting at a barrier


def publication(number: int, shared: SharedBytes) -> bytes:
    """The message that ``shared`` is published under ``number``."""
    return _MESSAGE.pack(number, shared.segment.number if shared.segment else 0, shared.offset, shared.bytes.numel())


def arrival(values: Triple) -> bytes:
    """The message that a rank has arrived at a barrier with these ``values``."""
    return _MESSAGE.pack(*values, _ARRIVAL)


def release(segment_number: int) -> bytes:
    """The message that a segment of the sender is closed."""
    return _MESSAGE.pack(0, segment_number, 0, _RELEASE)


class PeerLostError(RuntimeError):
    """A rank that this one waits for has ended, or has given up on the others."""


class PeerClosedError(PeerLostError):
    """The peer has closed its end of the connection, after it had read all that this rank sent."""


class PeerConnection:
    """The socket to one local rank, the segments of it that are mapped here, and the messages it sent."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        connection.setblocking(False)
        self.known: set[int] = set()  # the segments of this rank that the peer has mapped
        self.mapped: dict[int, RemoteSegment] = {}  # by the number of the segment
        self.arrivals: deque[Triple] = deque()
        self._published: dict[int, torch.Tensor] = {}  # by the number of the publication
        self._poll = select.poll()

    def send(self, message: bytes, segment: Segment | None = None) -> bool:
        """Send a message about ``segment``, with its file if that is new. Returns False if the socket is full."""
        try:
            if segment is None or segment.number in self.known:
                self.socket.send(message)
            else:
                socket.send_fds(self.socket, [message], [segment.file])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(self._lost()) from error
        if segment is not None:
            self.known.add(segment.number)
        return True

    def receive(self) -> bool:
        """Receive one message. Returns False if there is none."""
        try:
            message, ancillary, _, _ = self.socket.recvmsg(_MESSAGE.size, _ANCILLARY)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(self._lost()) from error
        if not message:
            raise PeerClosedError(self._lost())
        self._handle(ancillary, *_MESSAGE.unpack(message))
        return True

    def _handle(self, ancillary: list[Any], number: int, segment: int, offset: int, size: int) -> None:
        for _, _, file in ancillary:  # one at most, as in ``send``
            self.mapped[segment] = RemoteSegment(_map(*_FILE.unpack(file)))
        if size == _ABORT:
            message = f"rank {self.rank} of the group has given up on the others: its call failed"
            raise PeerLostError(message) if number else PeerClosedError(message)
        if size == _ARRIVAL:
            self.arrivals.append((number, segment, offset))
        elif size == _RELEASE:
            self.mapped.pop(segment, None)
        else:
            self._published[number] = self.mapped[segment].view(offset, size) if size else EMPTY

    def drain(self) -> None:
        """Receive all messages that have come."""
        while self.receive():
            pass

    def poll(self, events: int, seconds: float) -> bool:
        """Wait for one of the ``events`` of the socket, an hour at most. Returns False if none came in time."""
        self._poll.register(self.socket, events)
        spun = time.perf_counter() + min(_SPIN, seconds)
        while time.perf_counter() < spun:
            if self._poll.poll(0):
                return True
            os.sched_yield()
        return bool(self._poll.poll(max(0.0, min(seconds, 3600.0)) * 1000))  # poll counts in an int of milliseconds

    def has(self, number: int) -> bool:
        """Whether the publication of this number has been received."""
        return number in self._published

    def take(self, number: int) -> torch.Tensor:
        """Remove and return the publication of this number, (size,) uint8."""
        return self._published.pop(number)

    def discard_outside(self, numbers: range) -> None:
        """Discard publications of other numbers."""
        self._published = {each: published for each, published in self._published.items() if each in numbers}

    def check_not_aborted(self) -> None:
        """Raise ``PeerLostError`` if the peer gave up at this barrier. It may have left since it passed."""
        with suppress(PeerClosedError):
            self.drain()

    def abort(self, at_barrier: bool) -> None:
        """Close the connection, and let the peer know that it was not done, and if a barrier was not passed."""
        with suppress(OSError):
            self.socket.send(_MESSAGE.pack(at_barrier, 0, 0, _ABORT))
        self.socket.close()

    def _lost(self) -> str:
        return f"rank {self.rank} of the group has ended or left it, while this rank still needs it"


class RemoteSegment:
    """A segment of another rank, mapped here. Views of it are kept: each call publishes the same ones."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = storage.data_ptr()
        self._storage = storage
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def view(self, offset: int, size: int) -> torch.Tensor:
        """The ``size`` bytes from ``offset`` on, (size,) uint8; the same object each time."""
        if (offset, size) not in self._views:
            view = torch.empty(0, dtype=torch.uint8).set_(self._storage, offset, (size,), (1,))
            self._views[offset, size] = view
        return self._views[offset, size]


def _map(file: int) -> torch.UntypedStorage:
    """Map a file to read it, and close it: a process may map many segments, but not have many files open."""
    try:
        memory = mmap(file, 0, prot=PROT_READ)
    finally:
        os.close(file)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
