"""Local ranks: find which mesh axes have all their ranks on one host, and connect these for shared memory.

Two ranks are on one host if they have the same kernel and the same network namespace, so that each can reach a Unix
socket of the other. An axis is ``shared`` if that holds for all its groups, over the whole mesh: a rank that looked at
its own group only could compile another program than the others. Where a rank cannot share memory, or cannot connect,
all ranks communicate by messages, and the report says why.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from passes import Mesh
from passes.runtime.local_peers import LocalPeers, local_peers_of, register_local_peers
from passes.runtime.segments import allocate_segment

from .._torch import timeout_of
from .consensus import AllGatherText

_CONNECTING = 20.0  # seconds for ranks to connect, all of which have come
_PROBE = 1.0  # seconds after which a rank that has not connected is asked for
_STRANGER = 5.0  # seconds for a process that connects to name its rank


def connect_local_ranks(
    mesh: Mesh, groups: Mapping[int, Any], all_gather_text: AllGatherText
) -> tuple[Mesh, list[str]]:
    """Return ``mesh`` with ``shared`` set for each axis whose ranks share memory, and notes on what cannot be shared.

    ``groups``: the gloo group of this rank along each axis that has several ranks. All ranks call it together.
    """
    if not groups:
        return mesh, []
    shared, sockets, notes = _connect_groups(mesh, groups, all_gather_text)
    for k, each in sockets.items():
        peers = LocalPeers(mesh.axes[k].coordinate, each, timeout_of(groups[k]))
        register_local_peers(groups[k].group_name, groups[k], peers)
    axes = tuple(replace(axis, shared=k in shared) for k, axis in enumerate(mesh.axes))
    return replace(mesh, axes=axes), notes


def _connect_groups(
    mesh: Mesh, groups: Mapping[int, Any], all_gather_text: AllGatherText
) -> tuple[list[int], dict[int, dict[int, socket.socket]], list[str]]:
    """The axes whose ranks share memory; for each that is not connected yet, sockets to all others; and notes."""
    with ExitStack() as stack:
        host, listener, problem = "", None, ""
        try:
            host = _host()
            listener = stack.enter_context(_Listener()) if host else None
        except OSError as error:
            host, problem = "", str(error)
        connected = {str(k): local_peers_of(group.group_name, group) is not None for k, group in groups.items()}
        address = listener.address if listener else []
        description = {"host": host, "address": address, "connected": connected, "problem": problem}
        described = _DescribedRanks(mesh, [json.loads(text) for text in all_gather_text(json.dumps(description))])
        shared = [k for k in groups if described.are_on_one_host(k)]
        new = [k for k in shared if not described.are_connected(k)]
        sockets: dict[int, dict[int, socket.socket]] = {}
        try:
            for k in new:
                assert listener is not None, "a rank without a listener is on no host"
                sockets[k] = listener.connect_group(k, mesh.axes[k].coordinate, described.addresses(k))
        except OSError as error:
            problem = str(error)
            if listener is not None:
                listener.close()  # who waits for this rank learns at once that it gave up
        notes = described.problems()
        if new:  # all are connected, or none: a call starts through sockets on all ranks, or on none
            problems = all_gather_text(problem)
            notes += [
                f"rank {k} could not connect to the others on its host: {text}"
                for k, text in enumerate(problems)
                if text
            ]
        if new and any(problems):
            _close(sockets)
            shared, sockets = [k for k in shared if k not in new], {}
    return shared, sockets, [f"{note}; all ranks communicate by messages instead of shared memory" for note in notes]


def _close(sockets: Mapping[int, Mapping[int, socket.socket]]) -> None:
    for each in sockets.values():
        for made in each.values():
            made.close()


def _host() -> str:
    """A text that is the same on all ranks of one host; empty where the system has no memory that they could share.

    Raises ``OSError`` where it has, but refuses it to this process.
    """
    if not hasattr(os, "memfd_create"):  # another system than Linux
        return ""
    allocate_segment(1 << 16)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/thread-self/ns/net').st_ino}"


class _DescribedRanks:
    """Descriptions of all ranks of a mesh, by themselves: host, address, and the axes that each is connected along."""

    def __init__(self, mesh: Mesh, ranks: list[dict[str, Any]]) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.numbers = torch.arange(len(ranks)).view([axis.size for axis in mesh.axes])

    def are_on_one_host(self, k: int) -> bool:
        """Whether each group along axis ``k`` is on one host."""
        hosts = [{self.ranks[number]["host"] for number in group} for group in self._groups(k)]
        return all(len(group) == 1 and "" not in group for group in hosts)

    def problems(self) -> list[str]:
        """The reasons that kept ranks from sharing memory."""
        found = [(number, rank["problem"]) for number, rank in enumerate(self.ranks)]
        return [f"rank {number} cannot share memory: {problem}" for number, problem in found if problem]

    def are_connected(self, k: int) -> bool:
        """Whether all ranks are connected along axis ``k``."""
        return all(rank["connected"][str(k)] for rank in self.ranks)

    def addresses(self, k: int) -> list[list[str]]:
        """The addresses of this rank's group along axis ``k``, in order."""
        here = [slice(None) if other == k else axis.coordinate for other, axis in enumerate(self.mesh.axes)]
        return [self.ranks[number]["address"] for number in self.numbers[tuple(here)].tolist()]

    def _groups(self, k: int) -> list[list[int]]:
        groups: list[list[int]] = self.numbers.movedim(k, -1).reshape(-1, self.mesh.axes[k].size).tolist()
        return groups


@dataclass
class _Visitor:
    """A process that has connected, and has not named its rank yet."""

    socket: socket.socket
    until: float = field(default_factory=lambda: time.monotonic() + _STRANGER)


class _Listener:
    """A socket that ranks of this host connect to. Its name is visible to all users; a secret token admits ranks only.

    ``address``: the name and the token.
    """

    def __init__(self) -> None:
        self.address = [secrets.token_hex(8), secrets.token_hex(16)]
        self._accepted: dict[tuple[int, int], socket.socket] = {}  # by axis and coordinate
        self._visitors: list[_Visitor] = []

    def __enter__(self) -> _Listener:
        self._socket = _unix_socket()
        try:
            self._socket.bind(_abstract_address(self.address[0]))
            self._socket.listen(1024)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more connections, and close those that nobody asked for."""
        for unclaimed in [self._socket, *self._accepted.values(), *(visitor.socket for visitor in self._visitors)]:
            unclaimed.close()

    def connect_group(self, axis: int, coordinate: int, addresses: Sequence[list[str]]) -> dict[int, socket.socket]:
        """Connect to all ranks of a group: to those before this one at their listeners; those after it connect here.

        Raises ``OSError`` if that is refused, or takes too long.
        """
        deadline = time.monotonic() + _CONNECTING
        found: dict[int, socket.socket] = {}
        try:
            for other in range(coordinate):
                found[other] = _connect(addresses[other], (axis, coordinate))
            for other in range(coordinate + 1, len(addresses)):
                self._wait_for((axis, other), addresses[other], deadline)
                found[other] = self._accepted.pop((axis, other))
        except BaseException:
            _close({axis: found})
            raise
        return found

    def _wait_for(self, position: tuple[int, int], address: list[str], deadline: float) -> None:
        """Wait until the rank at ``position`` has connected; its own listener is open as long as it may still come."""
        next_probe = time.monotonic() + _PROBE
        while position not in self._accepted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {position[1]} of the axis did not connect within {_CONNECTING:g} s")
            if time.monotonic() > next_probe:
                next_probe += _PROBE
                _probe(address)
            self._serve()

    def _serve(self) -> None:
        """Accept connections, and hear those accepted before: side by side, since any local process can connect."""
        with selectors.DefaultSelector() as selector:
            for each in (self._socket, *(visitor.socket for visitor in self._visitors)):
                selector.register(each, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(0.1)}
        for visitor in [visitor for visitor in self._visitors if visitor.socket in ready]:
            self._visitors.remove(visitor)
            self._hear(visitor.socket)
        for visitor in [visitor for visitor in self._visitors if time.monotonic() > visitor.until]:
            self._visitors.remove(visitor)
            visitor.socket.close()
        if self._socket in ready:
            with suppress(BlockingIOError, ConnectionError):  # gone again
                accepted, _ = self._socket.accept()
                self._visitors.append(_Visitor(accepted))

    def _hear(self, visitor: socket.socket) -> None:
        """Keep the connection of a rank; close that of anybody else."""
        try:
            token, axis, coordinate = json.loads(visitor.recv(1024))
            is_rank = secrets.compare_digest(str(token), self.address[1]) and _user_of(visitor) == os.getuid()
            if is_rank and isinstance(axis, int) and isinstance(coordinate, int):
                self._accepted[axis, coordinate] = visitor
                return
        except (OSError, ValueError, TypeError):  # another process says anything, or nothing
            pass
        visitor.close()


def _user_of(connected: socket.socket) -> int:
    """The user that the process at the other end of a Unix socket runs as."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _connect(address: list[str], position: tuple[int, int]) -> socket.socket:
    """Connect to a listener; ``position``: the axis, and this rank's coordinate along it."""
    name, token = address
    made = _unix_socket()
    try:
        made.settimeout(_CONNECTING)
        made.connect(_abstract_address(name))
        made.send(json.dumps([token, *position]).encode())
    except BaseException:
        made.close()
        raise
    return made


def _probe(address: list[str]) -> None:
    """Raise ``OSError`` if a listener is gone, with its rank."""
    with _unix_socket() as made:
        made.settimeout(_PROBE)
        with suppress(TimeoutError):  # many connect to it
            made.connect(_abstract_address(address[0]))


def _abstract_address(name: str) -> str:
    """The address of a Unix socket that is no file, and is removed with the last process that has it open."""
    return f"\0spmd-{name}"


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
