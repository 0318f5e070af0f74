"""Which ranks are on one host: they find each other when a program is compiled, and talk through its memory then.

On one host are ranks that have the same kernel and the same network namespace, so that a Unix socket of one can be
reached by the other. An axis is shared if that holds for each of its groups, over all of the mesh: what a rank's own
group could do alone would lead it to another program.
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
from passes.runtime.shared_memory import Neighbours, connect, neighbours_of

from .._torch import timeout_of
from .consensus import Share

_Said = list[dict[str, Any]]


def introduce(mesh: Mesh, device_mesh: DeviceMesh, share: Share, timeout: float) -> Mesh:
    """``mesh`` with ``shared`` said of each axis whose ranks see each other's memory. All ranks call it together.

    Only gloo's axes are asked: what moves tensors of a GPU knows its neighbours itself. ``timeout``: seconds that a
    rank waits for another to connect. Raises ``RankMismatchError`` if one does not.
    """
    groups = {
        k: device_mesh.get_group(k) for k, axis in enumerate(mesh.axes) if axis.size > 1 and axis.backend == "gloo"
    }
    if not groups:
        return mesh
    host = _host()
    with _Door() if host else nullcontext() as door:
        known = {str(k): neighbours_of(mesh.axes[k].group, group) is not None for k, group in groups.items()}
        told = share(json.dumps({"host": host, "door": door.address if door else [], "known": known}))
        lines = _Lines(mesh, [json.loads(text) for text in told])
        shared = [k for k in groups if lines.are_on_one_host(k)]
        new = [k for k in shared if not lines.know_each_other(k)]
        made = {k: door.sockets(k, mesh.axes[k].coordinate, lines.doors(k), timeout) for k in new if door}
    if new:
        share("connected")  # all are, or nobody is: a call begins through sockets on all ranks, or on none
    for k, sockets in made.items():
        neighbours = Neighbours(mesh.axes[k].coordinate, sockets, timeout_of(groups[k]))
        connect(mesh.axes[k].group, groups[k], neighbours)
    return Mesh(tuple(replace(axis, shared=k in shared) for k, axis in enumerate(mesh.axes)))


def _host() -> str:
    """What ranks of one host say alike; nothing where there is no memory that they could share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/thread-self/ns/net').st_ino}" if hasattr(os, "memfd_create") else ""
    except OSError:  # another system than Linux
        return ""


class _Lines:
    """What the ranks of a mesh said, along its axes."""

    def __init__(self, mesh: Mesh, said: _Said) -> None:
        self.mesh, self.said = mesh, said
        sizes = [axis.size for axis in mesh.axes]
        self.numbers = torch.arange(len(said)).view(sizes)

    def are_on_one_host(self, k: int) -> bool:
        """Whether each group along axis ``k`` is on one host."""
        hosts = [{self.said[number]["host"] for number in line} for line in self._every(k)]
        return all(len(line) == 1 and "" not in line for line in hosts)

    def know_each_other(self, k: int) -> bool:
        """Whether all ranks are connected along axis ``k``."""
        return all(said["known"][str(k)] for said in self.said)

    def doors(self, k: int) -> list[list[str]]:
        """The doors of this rank's group along axis ``k``, in order."""
        here = [slice(None) if other == k else axis.coordinate for other, axis in enumerate(self.mesh.axes)]
        return [self.said[number]["door"] for number in self.numbers[tuple(here)].tolist()]

    def _every(self, k: int) -> list[list[int]]:
        lines: list[list[int]] = self.numbers.movedim(k, -1).reshape(-1, self.mesh.axes[k].size).tolist()
        return lines


class _Door:
    """Where others of this host connect. All can see its name; who comes in has to know the word."""

    def __init__(self) -> None:
        self.address = [secrets.token_hex(8), secrets.token_hex(16)]
        self._entered: dict[tuple[int, int], socket.socket] = {}  # by axis and coordinate

    def __enter__(self) -> _Door:
        self._socket = _unix()
        self._socket.bind(_abstract(self.address[0]))
        self._socket.listen(1024)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def sockets(self, axis: int, mine: int, doors: Sequence[list[str]], timeout: float) -> dict[int, socket.socket]:
        """A socket to each other rank of a group: this one knocks at the doors before its own, and lets in the rest."""
        try:
            found = {other: _knock(doors[other], (axis, mine), timeout) for other in range(mine)}
            self._socket.settimeout(timeout)
            for other in range(mine + 1, len(doors)):
                while (axis, other) not in self._entered:
                    self._let_in(timeout)
                found[other] = self._entered.pop((axis, other))
        except OSError as error:
            raise RankMismatchError(
                f"rank {mine} of an axis could not connect to the others on its host within {timeout:g} s: {error}. "
                "Look at their output; without the pass Realise, ranks need no connections of their own"
            ) from error
        return found

    def _let_in(self, timeout: float) -> None:
        entered, _ = self._socket.accept()
        entered.settimeout(timeout)
        word, axis, coordinate = json.loads(entered.recv(1024) or b'["", 0, 0]')
        if word == self.address[1]:
            self._entered[axis, coordinate] = entered


def _knock(door: list[str], said: tuple[int, int], timeout: float) -> socket.socket:
    name, word = door
    made = _unix()
    made.settimeout(timeout)
    made.connect(_abstract(name))
    made.send(json.dumps([word, *said]).encode())
    return made


def _abstract(name: str) -> str:
    """The address of a Unix socket that is no file, and goes with the last who has it open."""
    return f"\0spmd-{name}"


def _unix() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
