"""Memory that the ranks of one host see together, and how they tell each other what lies where.

Each rank writes into *segments* of its own (``segment``), which are files in memory without a name. The ranks of a
process group that are on one host are ``Neighbours``: each has a Unix socket to each other. To *post* a tensor is to
tell all neighbours where it lies, along with the file the first time; to *receive* is to look at what all have posted,
as tensors over the same memory. What one wrote before it posted is seen by who has received, since a message goes
through the kernel. To *meet* is to hear three numbers of each; all have come then. Nothing else says when a reader is
done: what was posted must not be written to before all ranks have met again.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from mmap import mmap
from typing import Any, cast

import torch

_MESSAGE = struct.Struct("<qqqq")  # the number of what is posted; its segment's, an offset and a length in bytes
_GONE = -1  # in the place of a length: the segment is there no more
_MEETING = -2  # in the place of a length: what stands before it are three numbers that the rank says
_GIVEN_UP = -3  # in the place of a length: the rank has left before it was done
_PER_CALL = 1 << 32  # more than anybody posts in one call
_NOTHING = torch.empty(0, dtype=torch.uint8)
_Said = tuple[int, int, int]
_numbers = count(1)
_segments: dict[int, _Segment] = {}  # by address


@dataclass(frozen=True)
class _Segment:
    """A file in memory that this process has mapped; it closes when nothing lies in it any more."""

    number: int
    size: int
    file: int


def segment(size: int) -> torch.Tensor:
    """``size`` bytes that neighbours can look at, all zero, (size,) in uint8. Raises ``OSError`` if there are none."""
    try:
        made, memory = _mapped_file(max(size, 1))
    except OSError as error:
        said = f"{size:,} bytes of memory that ranks of a host share could not be had: {error.strerror}"
        raise OSError(
            error.errno, f"{said}. They take two open files (ulimit -n) and count as shared memory"
        ) from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # which keeps the map
    _segments[tensor.data_ptr()] = made
    weakref.finalize(memory, _close, tensor.data_ptr(), made).atexit = False
    return tensor[:size]


def _mapped_file(size: int) -> tuple[_Segment, mmap]:
    file = os.memfd_create("spmd")
    try:
        os.ftruncate(file, size)
        return _Segment(next(_numbers), size, file), mmap(file, size)
    except BaseException:
        os.close(file)
        raise


def _close(address: int, gone: _Segment) -> None:
    if _segments.get(address) is gone:  # else another thread has made one there meanwhile
        del _segments[address]
    os.close(gone.file)
    for each in _all:
        each.forget(gone.number)


@dataclass(frozen=True)
class Visible:
    """What neighbours can look at: ``bytes`` (size,) in uint8, and where in a segment they lie, if there are any."""

    bytes: torch.Tensor
    segment: _Segment | None = None
    offset: int = 0


def visible(tensor: torch.Tensor) -> Visible | None:
    """A contiguous ``tensor`` as neighbours can look at it; None if it does not lie in a segment."""
    if not tensor.nbytes:
        return Visible(_NOTHING)
    start = tensor.data_ptr()
    for address, each in list(_segments.items()):  # one may close while we look
        if address <= start and start + tensor.nbytes <= address + each.size:
            return Visible(tensor.view(-1).view(torch.uint8), each, start - address)
    return None


def copied(tensor: torch.Tensor) -> Visible:
    """A copy that neighbours can look at."""
    bytes = tensor.contiguous().view(-1).view(torch.uint8)
    copy = visible(segment(bytes.numel()).copy_(bytes))
    assert copy is not None, "it lies in a segment that was just made"
    return copy


def mapped() -> set[int]:
    """The addresses at which segments of other ranks are mapped: what lies there is theirs, and counts as theirs."""
    return {each.address for neighbours in _all for each in neighbours.mapped()}


class _Ended(RuntimeError):
    """A rank has left that had taken all we said to it."""


class Neighbours:
    """The other ranks of a process group as one of them sees it: ``sockets`` by rank, one to each other.

    ``timeout``: seconds that a rank waits for another at most.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout: float) -> None:
        self.rank, self.ranks, self.timeout = rank, len(sockets) + 1, timeout
        self._peers = {each: _Peer(each, sockets[each]) for each in sorted(sockets)}
        self._next = 0  # the number of what is posted next
        self._own: dict[int, torch.Tensor] = {}  # by number, until all of that number are received
        self._gone: list[int] = []
        _all.add(self)

    def begin(self, call: int) -> None:
        """Count anew, in a call that all ranks number alike, and higher than those before.

        So what a rank missed when it failed in an earlier call is never taken for what is posted in this one.
        """
        self._next = call * _PER_CALL
        self._own.clear()
        for peer in self._peers.values():
            peer.drop_before(self._next)

    def meet(self, said: _Said, seconds: float) -> list[_Said]:
        """What every rank says at this point, in the order of ranks, once all have come.

        Waits so many seconds to hear them. Raises ``RuntimeError`` if one does not come or has gone, and then, as when
        it is interrupted, gives up on the others for good: none shall take what it has said for its presence later.
        """
        try:
            self._retire()
            self._tell(_MESSAGE.pack(*said, _MEETING), None)
            since = time.monotonic()
            met = [self._met(rank, seconds, since) if rank != self.rank else said for rank in range(self.ranks)]
            for peer in self._peers.values():
                peer.check_presence()
            return met
        except BaseException:
            for peer in self._peers.values():
                peer.give_up()
            raise

    def _met(self, rank: int, seconds: float, since: float) -> _Said:
        peer, wait = self._peers[rank], None
        while not peer.met:
            if not peer.read():
                wait = wait or self._waiting(peer, seconds, since)
                wait(select.POLLIN)
        return peer.met.popleft()

    def post(self, seen: Visible) -> int:
        """Tell all neighbours where something lies; returns its number, under which theirs is received."""
        number, self._next = self._next, self._next + 1
        lies = seen.segment.number if seen.segment else 0
        self._tell(_MESSAGE.pack(number, lies, seen.offset, seen.bytes.numel()), seen.segment)
        self._own[number] = seen.bytes
        return number

    def _retire(self) -> None:
        """Tell the others which segments of this rank are there no more."""
        while self._gone:
            gone = self._gone.pop()
            self._tell(_MESSAGE.pack(0, gone, 0, _GONE), None)
            for peer in self._peers.values():
                peer.known.discard(gone)

    def awaits(self, number: int) -> bool:
        """Whether what was posted under ``number`` in this call is still to be received."""
        return number in self._own

    def receive(self, number: int) -> list[torch.Tensor]:
        """What each rank has posted under ``number``, in the order of ranks: flat tensors of bytes.

        What lies where something lay before is the same object. Waits for them. Raises ``RuntimeError`` if a rank has
        gone, has left this call for another one, or does not come within the timeout.
        """
        own = self._own.pop(number)
        return [self._taken(self._peers[rank], number) if rank != self.rank else own for rank in range(self.ranks)]

    def _taken(self, peer: _Peer, number: int) -> torch.Tensor:
        wait = None
        while not peer.has(number):
            if peer.met:  # messages come in order
                raise RuntimeError(
                    f"rank {peer.rank} of the group has begun another call, while rank {self.rank} still needs it in "
                    "this one: look at the output of that rank for what went wrong there"
                )
            if not peer.read():
                wait = wait or self._waiting(peer, self.timeout)
                wait(select.POLLIN)
        return peer.take(number)

    def forget(self, segment_number: int) -> None:
        """Tell the others, when all meet next, that a segment of this rank is there no more, if they know it."""
        if any(segment_number in peer.known for peer in self._peers.values()):
            self._gone.append(segment_number)

    def mapped(self) -> Iterator[_Mapped]:
        """The segments of the others that are mapped here."""
        for peer in self._peers.values():
            yield from peer.mapped.values()

    def close(self) -> None:
        """Have nothing to do with them any more, which they see."""
        for peer in self._peers.values():
            peer.socket.close()

    def _tell(self, message: bytes, lies: _Segment | None) -> None:
        for peer in self._peers.values():
            wait = None
            while not peer.send(message, lies):
                wait = wait or self._waiting(peer, self.timeout)
                for each in self._peers.values():  # one that cannot take more may wait for us to take its messages
                    each.drain()
                wait(select.POLLOUT | select.POLLIN)

    def _waiting(self, peer: _Peer, seconds: float, since: float | None = None) -> Callable[[int], None]:
        """A function that waits until something can be done with a peer, and raises when the time is over."""
        deadline = (time.monotonic() if since is None else since) + seconds

        def wait(events: int) -> None:
            left = deadline - time.monotonic()
            if left <= 0 or not peer.wait(events, left):
                raise RuntimeError(
                    f"rank {self.rank} of a process group waited {seconds:g} s for its rank {peer.rank}, which "
                    "did not come: look at the output of that rank"
                )

        return wait


class _Peer:
    """One neighbour: the socket to it, the segments of it that are mapped here, and what it has posted."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        connection.setblocking(False)
        self.known: set[int] = set()  # segments of ours that it has
        self.mapped: dict[int, _Mapped] = {}  # by the number of the segment
        self._posted: dict[int, torch.Tensor] = {}
        self.met: deque[_Said] = deque()  # what it said when it came to meet us
        self._poll = select.poll()

    def send(self, message: bytes, lies: _Segment | None) -> bool:
        """Whether there was room for it. ``lies``: the segment that it is about, sent along where it is new."""
        try:
            if lies is None or lies.number in self.known:
                self.socket.send(message)
            else:
                socket.send_fds(self.socket, [message], [lies.file])
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(self._lost()) from error
        if lies is not None:
            self.known.add(lies.number)
        return True

    def drop_before(self, number: int) -> None:
        """Forget what it posted under smaller numbers."""
        self._posted = {each: posted for each, posted in self._posted.items() if each >= number}

    def give_up(self) -> None:
        """Leave it, and let it know that this was not the end."""
        with suppress(OSError):
            self.socket.send(_MESSAGE.pack(0, 0, 0, _GIVEN_UP))
        self.socket.close()

    def check_presence(self) -> None:
        """Raise ``RuntimeError`` if it has given up on us; one that said what it had to say may have ended since."""
        with suppress(_Ended):
            self.drain()

    def has(self, number: int) -> bool:
        """Whether we know what it posted under ``number``."""
        return number in self._posted

    def take(self, number: int) -> torch.Tensor:
        """What it posted under ``number``, in bytes."""
        return self._posted.pop(number)

    def drain(self) -> None:
        """Take in all that has come."""
        while self.read():
            pass

    def wait(self, events: int, seconds: float) -> bool:
        """Whether any of the events came in time."""
        self._poll.register(self.socket, events)
        return bool(self._poll.poll(seconds * 1000))

    def read(self) -> bool:
        """Take in one message, if one has come."""
        try:
            message, files, _, _ = socket.recv_fds(self.socket, _MESSAGE.size, 1)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(self._lost()) from error
        if not message:
            raise _Ended(self._lost())
        number, lies, offset, size = _MESSAGE.unpack(message)
        if files:
            self.mapped[lies] = _Mapped(_storage(files[0]))
        if size == _GIVEN_UP:
            raise RuntimeError(
                f"rank {self.rank} of the group has given up on the others, who came too late, or it was interrupted"
            )
        if size == _MEETING:
            self.met.append((number, lies, offset))
        elif size == _GONE:
            self.mapped.pop(lies, None)
        else:
            self._posted[number] = self.mapped[lies].at(offset, size) if size else _NOTHING
        return True

    def _lost(self) -> str:
        return f"rank {self.rank} of the group has ended or left it, while this rank still needs it"


class _Mapped:
    """A segment of another rank, and what we look at in it: ranks post the same places in each call."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address = storage.data_ptr()
        self._storage = storage
        self._seen: dict[tuple[int, int], torch.Tensor] = {}

    def at(self, offset: int, size: int) -> torch.Tensor:
        """The ``size`` bytes from ``offset`` on."""
        if (offset, size) not in self._seen:
            seen = torch.empty(0, dtype=torch.uint8).set_(self._storage, offset, (size,), (1,))
            self._seen[offset, size] = seen
        return self._seen[offset, size]


def _storage(file: int) -> torch.UntypedStorage:
    """What lies in a file, which is closed: a process may map many segments, but not have many files open."""
    try:
        size = os.fstat(file).st_size
        memory = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", shared=True, nbytes=size)
        return cast(torch.UntypedStorage, memory)
    finally:
        os.close(file)


_all: weakref.WeakSet[Neighbours] = weakref.WeakSet()
# By the name of the group, and with it: names come again, groups do not.
_neighbours: dict[str, tuple[weakref.ref[Any], Neighbours]] = {}


def connect(name: str, group: Any, neighbours: Neighbours) -> None:
    """From now on, and as long as there is ``group``, these are its neighbours; collectives know it by ``name``."""
    disconnect(name)
    _neighbours[name] = weakref.ref(group, lambda gone: disconnect(name, gone)), neighbours


def disconnect(name: str, group: weakref.ref[Any] | None = None) -> None:
    """Let the neighbours of this name go, if they are those of ``group``, where that is said."""
    found, neighbours = _neighbours.get(name, (None, None))
    if neighbours is not None and group in (None, found):
        neighbours.close()
        del _neighbours[name]


def neighbours_of(name: str, group: Any) -> Neighbours | None:
    """The neighbours in a process group, if its ranks were connected."""
    found = _neighbours.get(name)
    return found[1] if found is not None and found[0]() is group else None
