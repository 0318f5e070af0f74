"""Local peers: the ranks of a process group that are on one host, and exchange tensors through shared memory.

Each rank has a connection to each other (``peer_connection.py``). ``publish`` lets all peers read a tensor in a segment
of this rank (``segments.py``); ``collect`` returns the publications of all ranks, as tensors over the same memory.
``barrier`` is a barrier that also all-gathers three integers. Nothing else synchronizes readers with writers: a
published tensor must not be written to before all ranks have passed another barrier.
"""

from __future__ import annotations

import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from .peer_connection import PeerConnection, PeerLostError, RemoteSegment, Triple, arrival, publication, release
from .segments import Segment, SharedBytes, last_closed, open_segments

_PER_CALL = 1 << 32  # more than a call publishes
_CALLS = 1 << 30  # numbers of publications count modulo this number of calls, since messages have 63 bits for them

Waiting = Callable[[Callable[[float], bool]], None]
"""Waits until a function, given the seconds that it may take, returns True; raises if that takes too long."""


class LocalPeers:
    """The other ranks of a process group as one of them sees it: ``sockets`` by rank, one to each other.

    ``timeout``: how many seconds a rank waits for another.
    """

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], timeout: float) -> None:
        self.rank, self.ranks, self.timeout = rank, len(sockets) + 1, timeout
        self._peers = {each: PeerConnection(each, sockets[each]) for each in sorted(sockets)}
        self._next = 0  # the number of the next publication
        self._last_closed = last_closed()  # when segments were last released
        self._own: dict[int, torch.Tensor] = {}  # publications of this rank, until all of that number are collected
        self.is_closed = False
        _all.add(self)

    def start_call(self, call: int) -> None:
        """Number publications anew, in a call that has the same number on all ranks, and another one than those before.

        So what a rank missed when it failed in an earlier call is never taken for what is published in this one.
        """
        self._next = call % _CALLS * _PER_CALL
        self._own.clear()
        for peer in self._peers.values():
            peer.discard_outside(range(self._next, self._next + _PER_CALL))

    def barrier(self, values: Triple, waiting: Waiting | None = None) -> list[Triple]:
        """Wait until all ranks have arrived; returns the ``values`` of each, in the order of ranks.

        ``waiting`` waits for each rank; without it, the timeout holds for all. Raises ``PeerLostError`` if a rank has
        left, and what ``waiting`` raises. Then, as when it is interrupted, this rank aborts all its connections: its
        arrival must not be taken for that at a later barrier.
        """
        deadline = time.monotonic() + self.timeout
        try:
            self._release_closed_segments()
            self._send(arrival(values))
            for peer in self._peers.values():
                (waiting or self._until(deadline, peer))(partial(self._has_arrived, peer))
            others = [peer.arrivals.popleft() for peer in self._peers.values()]
            for peer in self._peers.values():
                peer.check_not_aborted()
        except BaseException:
            self.abort(at_barrier=True)
            raise
        return [*others[: self.rank], values, *others[self.rank :]]

    def _has_arrived(self, peer: PeerConnection, seconds: float) -> bool:
        """Wait for the arrival of ``peer``, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not peer.arrivals:
            if not peer.receive() and not peer.poll(select.POLLIN, deadline - time.monotonic()):
                return False
        return True

    def _until(self, deadline: float, peer: PeerConnection) -> Waiting:
        def wait(is_over: Callable[[float], bool]) -> None:
            if not is_over(deadline - time.monotonic()):
                raise PeerLostError(self._too_late(peer))

        return wait

    def _release_closed_segments(self) -> None:
        """Let the peers unmap the segments of this rank that were closed."""
        newest = last_closed()  # read first: one that is closed meanwhile is released next time
        if newest == self._last_closed:
            return
        self._last_closed = newest
        known = set[int]().union(*(peer.known for peer in self._peers.values()))
        for closed in known - open_segments():
            self._send(release(closed))
            for peer in self._peers.values():
                peer.known.discard(closed)

    def publish(self, shared: SharedBytes) -> int:
        """Let all peers read ``shared``. Returns its number, under which theirs is collected."""
        number, self._next = self._next, self._next + 1
        self._send(publication(number, shared), shared.segment)
        self._own[number] = shared.bytes
        return number

    def collect(self, number: int) -> list[torch.Tensor]:
        """Wait until each rank has published under ``number``; returns all, in the order of ranks, (size,) uint8 each.

        What is at the same address as before is the same object. Raises ``PeerLostError`` if a rank has left, has
        started another call, or does not publish within the timeout; ``RuntimeError`` if this rank has begun another
        call since.
        """
        if number not in self._own:
            raise RuntimeError("a collective is waited for, but the call that started it is over: another has begun")
        own = self._own.pop(number)
        others = [self._collect(peer, number) for peer in self._peers.values()]
        return [*others[: self.rank], own, *others[self.rank :]]

    def _collect(self, peer: PeerConnection, number: int) -> torch.Tensor:
        wait = None
        while not peer.has(number):
            if peer.arrivals:  # messages come in order
                raise PeerLostError(
                    f"rank {peer.rank} of the group has started another call, while rank {self.rank} still needs it in "
                    "this one: look at the output of that rank for what went wrong there"
                )
            if not peer.receive():
                wait = wait or self._waiting(peer)
                wait(select.POLLIN)
        return peer.take(number)

    def mapped_segments(self) -> Iterator[RemoteSegment]:
        """The segments of the peers that are mapped here."""
        for peer in self._peers.values():
            yield from peer.mapped.values()

    def close(self) -> None:
        """Close all connections, which the peers notice."""
        self.is_closed = True
        for peer in self._peers.values():
            peer.socket.close()

    def abort(self, at_barrier: bool = False) -> None:
        """Close all connections, and let the peers know that this rank's call was not done.

        ``at_barrier``: this rank waits at a barrier, so the others must not pass it.
        """
        self.is_closed = True
        for peer in self._peers.values():
            peer.abort(at_barrier)

    def _send(self, message: bytes, segment: Segment | None = None) -> None:
        for peer in self._peers.values():
            wait = None
            while not peer.send(message, segment):
                wait = wait or self._waiting(peer)
                for each in self._peers.values():  # one that cannot receive more may wait for us to receive
                    each.drain()
                wait(select.POLLOUT | select.POLLIN)

    def _waiting(self, peer: PeerConnection) -> Callable[[int], None]:
        """A function that waits for events of a peer's socket, and raises when the time is over."""
        deadline = time.monotonic() + self.timeout

        def wait(events: int) -> None:
            while not peer.poll(events, deadline - time.monotonic()):
                if time.monotonic() >= deadline:
                    raise PeerLostError(self._too_late(peer))

        return wait

    def _too_late(self, peer: PeerConnection) -> str:
        return (
            f"rank {self.rank} of a process group waited {self.timeout:g} s for its rank {peer.rank}, which did not "
            "come: look at the output of that rank"
        )


_all: weakref.WeakSet[LocalPeers] = weakref.WeakSet()
# By the name of the group, and with it: names are used again, groups are not.
_connected: dict[str, tuple[weakref.ref[Any], LocalPeers]] = {}


def _leave_in_child() -> None:
    """A forked child is no rank: if it kept the sockets, nobody would notice that its parent has died."""
    for peers in list(_all):
        peers.close()
    _connected.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def register_local_peers(name: str, group: Any, peers: LocalPeers) -> None:
    """Make ``peers`` those of ``group``, for as long as there is the group; collectives know it by ``name``."""
    disconnect(name)
    _connected[name] = weakref.ref(group, lambda gone: disconnect(name, gone)), peers


def disconnect(name: str, group: weakref.ref[Any] | None = None) -> None:
    """Close the connections of the group of this name; if ``group`` is given, only where the name is still its own."""
    found, peers = _connected.get(name, (None, None))
    if peers is not None and group in (None, found):
        peers.close()
        del _connected[name]


def abort_local_peers(name: str) -> None:
    """Close the connections of the group of this name, and let the peers know that this rank's call was not done."""
    found = _connected.pop(name, None)
    if found is not None:
        found[1].abort()


def local_peers_of(name: str, group: Any) -> LocalPeers | None:
    """The local peers in a process group; None if its ranks are not connected."""
    found = _connected.get(name)
    return found[1] if found is not None and found[0]() is group else None


def mapped_addresses() -> set[int]:
    """The addresses at which segments of other ranks are mapped: the memory there is theirs, and counts as theirs."""
    return {segment.address for peers in _all for segment in peers.mapped_segments()}
