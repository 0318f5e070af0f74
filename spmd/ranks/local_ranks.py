"""Local ranks: find which mesh axes have all their ranks on one host, and connect these for shared memory.

Two ranks are on one host if they have the same kernel and the same network namespace, so that each can reach a Unix
socket of the other. An axis is ``shared`` if that holds for all its groups, over the whole mesh: a rank that looked at
its own group only could compile another program than the others.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import Mesh, RankMismatchError
from passes.runtime.local_peers import LocalPeers, local_peers_of, register_local_peers

from .._torch import timeout_of
from .consensus import AllGatherText


def connect_local_ranks(mesh: Mesh, device_mesh: DeviceMesh, all_gather_text: AllGatherText, timeout: float) -> Mesh:
    """Return ``mesh`` with ``shared`` set for each axis whose ranks share memory. All ranks call it together.

    Only axes of gloo are considered: NCCL finds out itself which ranks are on one host. ``timeout``: how many seconds
    a rank waits for another to connect. Raises ``RankMismatchError`` if one does not.
    """
    groups = {
        k: device_mesh.get_group(k) for k, axis in enumerate(mesh.axes) if axis.size > 1 and axis.backend == "gloo"
    }
    if not groups:
        return mesh
    shared, sockets = _connect_groups(mesh, groups, all_gather_text, timeout)
    for k, each in sockets.items():
        peers = LocalPeers(mesh.axes[k].coordinate, each, timeout_of(groups[k]))
        register_local_peers(mesh.axes[k].group, groups[k], peers)
    return Mesh(tuple(replace(axis, shared=k in shared) for k, axis in enumerate(mesh.axes)))


def _connect_groups(
    mesh: Mesh, groups: dict[int, Any], all_gather_text: AllGatherText, timeout: float
) -> tuple[list[int], dict[int, dict[int, socket.socket]]]:
    """The axes whose ranks share memory; and for each of them that is not connected yet, sockets to all others."""
    host = _host()
    with _Listener() if host else nullcontext() as listener:
        connected = {str(k): local_peers_of(mesh.axes[k].group, group) is not None for k, group in groups.items()}
        description = {"host": host, "address": listener.address if listener else [], "connected": connected}
        described = _DescribedRanks(mesh, [json.loads(text) for text in all_gather_text(json.dumps(description))])
        shared = [k for k in groups if described.are_on_one_host(k)]
        new = [k for k in shared if not described.are_connected(k)]
        sockets = {
            k: listener.connect_group(k, mesh.axes[k].coordinate, described.addresses(k), timeout)
            for k in new
            if listener
        }
    if new:
        all_gather_text("connected")  # all are, or none: a call starts through sockets on all ranks, or on none
    return shared, sockets


def _host() -> str:
    """A text that is the same on all ranks of one host; empty where the system has no memory that they could share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/thread-self/ns/net').st_ino}" if hasattr(os, "memfd_create") else ""
    except OSError:  # another system than Linux
        return ""


class _DescribedRanks:
    """How each rank of a mesh describes itself: its host, the address it listens at, the axes it is connected along."""

    def __init__(self, mesh: Mesh, ranks: list[dict[str, Any]]) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.numbers = torch.arange(len(ranks)).view([axis.size for axis in mesh.axes])

    def are_on_one_host(self, k: int) -> bool:
        """Whether each group along axis ``k`` is on one host."""
        hosts = [{self.ranks[number]["host"] for number in group} for group in self._groups(k)]
        return all(len(group) == 1 and "" not in group for group in hosts)

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


class _Listener:
    """A socket that ranks of this host connect to. Its name is visible to all users; a secret token admits ranks only.

    ``address``: the name and the token.
    """

    def __init__(self) -> None:
        self.address = [secrets.token_hex(8), secrets.token_hex(16)]
        self._accepted: dict[tuple[int, int], socket.socket] = {}  # by axis and coordinate

    def __enter__(self) -> _Listener:
        self._socket = _unix_socket()
        self._socket.bind(_abstract_address(self.address[0]))
        self._socket.listen(1024)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def connect_group(
        self, axis: int, coordinate: int, addresses: Sequence[list[str]], timeout: float
    ) -> dict[int, socket.socket]:
        """Connect to all ranks of a group: to those before this one at their listeners; those after it connect here."""
        try:
            found = {other: _connect(addresses[other], (axis, coordinate), timeout) for other in range(coordinate)}
            self._socket.settimeout(timeout)
            for other in range(coordinate + 1, len(addresses)):
                while (axis, other) not in self._accepted:
                    self._accept(timeout)
                found[other] = self._accepted.pop((axis, other))
        except OSError as error:
            raise RankMismatchError(
                f"rank {coordinate} of an axis could not connect to the others on its host within {timeout:g} s: "
                f"{error}. Look at their output; without the pass Realise, ranks need no connections of their own"
            ) from error
        return found

    def _accept(self, timeout: float) -> None:
        accepted, _ = self._socket.accept()
        accepted.settimeout(timeout)
        token, axis, coordinate = json.loads(accepted.recv(1024) or b'["", 0, 0]')
        if token == self.address[1]:
            self._accepted[axis, coordinate] = accepted


def _connect(address: list[str], position: tuple[int, int], timeout: float) -> socket.socket:
    """Connect to a listener; ``position``: the axis, and this rank's coordinate along it."""
    name, token = address
    made = _unix_socket()
    made.settimeout(timeout)
    made.connect(_abstract_address(name))
    made.send(json.dumps([token, *position]).encode())
    return made


def _abstract_address(name: str) -> str:
    """The address of a Unix socket that is no file, and is removed with the last process that has it open."""
    return f"\0spmd-{name}"


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
