"""Consensus between the ranks of a mesh: all run the same program in one call, or all raise.

Every call starts with one tiny all_reduce on the CPU (``agree_on_program``), through shared memory where ranks are
connected: each rank contributes which program it is about to run, or that it must compile, or that it has failed. No
other collective can come between, since each rank's part in a call starts with it; so a rank never waits for a peer
that does something else. Compiled programs are then compared through the store (``Agreement``): ranks take their time
to compile, and one that fails notifies the others.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes import RankMismatchError
from passes.runtime.local_peers import disconnect, local_peers_of
from passes.runtime.peer_connection import Triple

from .._torch import default_store

AllGatherText = Callable[[str], list[str]]  # from this rank's text to those of all ranks, in the order of the mesh
COMPILE, FAILED = 1, 2  # sent in place of a program's identity
_COMPARED = 20_000  # characters of a text in which the first difference is found; the whole text is compared by hash


def identity_of(what: str, text: str) -> int:
    """A number for a program, the same on every rank that compiled it."""
    return int(hashlib.sha256(f"{what}\n{text}".encode()).hexdigest()[:15], 16) | 16


@dataclass(frozen=True)
class MeshRanks:
    """The ranks of a mesh and the process groups they communicate in; no ``groups`` where there is one rank only.

    ``timeout``: how many seconds a rank waits for the others, unless they all run a program.
    """

    groups: tuple[Any, ...]
    members: tuple[int, ...]
    timeout: float

    @classmethod
    def of(cls, mesh: DeviceMesh | None, timeout: float) -> MeshRanks:
        """The ranks of ``mesh``; where that is None, since it is not known yet, those of the world, if there is one."""
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return cls((), (), timeout)
        if mesh is None:
            return cls((cpu_group(dist.group.WORLD),), tuple(range(dist.get_world_size())), timeout)
        axes = [k for k in range(mesh.ndim) if mesh.size(k) > 1]
        return cls(tuple(cpu_group(mesh.get_group(k)) for k in axes), tuple(mesh.mesh.flatten().tolist()), timeout)

    def agree_on_program(self, what: str, intent: int, describe: Callable[[], list[str]]) -> None:
        """Wait until all ranks start this call. Raises ``RankMismatchError`` unless all have the same ``intent``.

        ``intent``: the identity of the program this rank is about to run, ``COMPILE`` or ``FAILED``. ``describe``
        describes the call in lines, of which the message shows the first that differs.
        """
        if not self.groups:
            return
        largest = intent, -intent, _calls + 1
        for group in self.groups:
            largest = self._all_reduce_max(what, largest, group, patient=intent > FAILED)
        self._start_call(largest[2])
        if largest[0] != -largest[1]:
            texts = self.all_gather_text(what, "\n".join([what, *describe()]), self.timeout)
            other = next(k for k, text in enumerate(texts) if text != texts[0])
            raise RankMismatchError(
                f"expected all ranks to run the same program of {what} in one call, but rank {self.members[other]} "
                f"differs from rank {self.members[0]}:\n{_first_difference(texts[0], texts[other])}"
            )

    def _start_call(self, call: int) -> None:
        """Give the call the same number on all ranks, whatever calls each had before, where they share memory."""
        global _calls
        _calls = call
        for group in self.groups:
            peers = local_peers_of(group.group_name, group)
            if peers is not None:
                peers.start_call(call)

    def _all_reduce_max(self, what: str, values: Triple, group: Any, patient: bool) -> Triple:
        """The maximum over a group. A ``patient`` rank waits as long as for any collective of a program."""
        peers = local_peers_of(group.group_name, group)
        try:
            if peers is None:
                return self._all_reduce_max_by_messages(values, group, patient)
            gathered = peers.barrier(values, peers.timeout if patient else self.timeout)
            first, second, third = map(max, zip(*gathered, strict=True))
            return first, second, third
        except BaseException as error:  # an interrupt, too
            for each in self.groups:  # so that ranks that wait for this one along another axis raise, too
                disconnect(each.group_name)
            if not isinstance(error, (RuntimeError, TimeoutError)):
                raise
            raise RankMismatchError(
                f"rank {dist.get_rank()} could not agree with the others on {what}: {error}. Every rank must call each "
                "compiled step, in the same order; look at the output of the others for one that ended or branched off"
            ) from error

    def _all_reduce_max_by_messages(self, values: Triple, group: Any, patient: bool) -> Triple:
        numbers = torch.tensor(values)
        work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        deadline = time.monotonic() + self.timeout
        while not patient and not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {self.timeout:g} s for all ranks to call it, but not all came")
            time.sleep(0.001)
        work.wait()
        first, second, third = numbers.tolist()
        return first, second, third

    def all_gather_text(self, what: str, text: str, timeout: float) -> list[str]:
        """Every rank's ``text``, in the order of the mesh, through the store."""
        keys, store = self.publish_text(text), default_store()
        try:
            store.wait(keys, timedelta(seconds=timeout))
            return [store.get(key).decode() for key in keys]
        except Exception as error:
            raise RankMismatchError(
                f"rank {dist.get_rank()} waited {timeout:.0f} s for all ranks at {what}, but not all came: look at the "
                "output of the others for one that ended or failed"
            ) from error

    def publish_text(self, text: str) -> list[str]:
        """Put this rank's ``text`` into the store; returns the keys under which all ranks put theirs."""
        store, rank = default_store(), dist.get_rank()
        mesh = hashlib.sha256(repr(self.members).encode()).hexdigest()[:8]
        # Counted in the store, so that a new process group starts anew.
        number = store.add(f"spmd/{mesh}/exchanges/{rank}", 1)
        store.set(f"spmd/{mesh}/exchange {number}/{rank}", text)
        return [f"spmd/{mesh}/exchange {number}/{member}" for member in self.members]


@contextmanager
def all_or_none(what: str, ranks: MeshRanks) -> Iterator[Agreement]:
    """Compile ``what`` on all ranks or on none.

    The body compiles; the methods of the agreement wait for the others. If the body raises, the others raise, too.
    """
    agreement = Agreement(what, ranks)
    try:
        yield agreement
    except BaseException as error:  # an interrupt, too
        agreement.report_failure(error)
        raise


class Agreement:
    """One attempt to compile, that all ranks have started."""

    def __init__(self, what: str, ranks: MeshRanks) -> None:
        self.what, self.ranks = what, ranks
        self._start = time.monotonic()
        self._published = False  # whether the others have this rank's part of the exchange that comes next

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's ``text``, in the order of the mesh. Raises ``RankMismatchError`` as ``agree`` does."""
        if not self.ranks.groups:
            return [text]
        texts = [text for _, text in self._all_gather(["so far", text])]
        self._published = False
        return texts

    def agree(self, text: str, proposed: list[int]) -> list[int]:
        """Wait for all ranks and return what rank 0 ``proposed``.

        Ranks do the same work: one that takes the timeout and more than twice as long as this one did is taken for
        gone. Raises ``RankMismatchError`` if a rank failed, did not come, or came with another ``text``.
        """
        if not self.ranks.groups:
            return proposed
        digest = hashlib.sha256(text.encode()).hexdigest()
        gathered = self._all_gather(["ready", proposed, digest, text[:_COMPARED]])
        different = [k for k, other in enumerate(gathered) if other[2] != gathered[0][2]]
        if different:
            one, other = self.ranks.members[0], self.ranks.members[different[0]]
            raise RankMismatchError(
                f"expected {self.what} to be the same on all ranks, but rank {other} differs from rank {one}:\n"
                f"{_first_difference(gathered[0][3], gathered[different[0]][3])}"
            )
        return list(gathered[0][1])

    def _all_gather(self, values: list[Any]) -> list[list[Any]]:
        """Every rank's ``values``: a state, and what belongs to it. Raises ``RankMismatchError`` if a rank failed."""
        self._published = True
        timeout = self.ranks.timeout + 2 * (time.monotonic() - self._start)
        texts = self.ranks.all_gather_text(self.what, json.dumps(values), timeout)
        gathered = [json.loads(text) for text in texts]
        for rank, (state, detail, *_) in zip(self.ranks.members, gathered, strict=True):
            if state == "failed":
                raise RankMismatchError(f"{self.what} was not compiled on any rank, since rank {rank} failed: {detail}")
        return gathered

    def report_failure(self, error: BaseException) -> None:
        """Notify the others that this rank does not come."""
        if not self._published and self.ranks.groups:
            self._published = True
            self.ranks.publish_text(json.dumps(["failed", f"{type(error).__name__}: {error}"[:_COMPARED]]))


_calls = 0  # the number of the last call, of any step
_cpu_groups: dict[Any, Any] = {}


def cpu_group(group: Any) -> Any:
    """The group itself if it moves CPU tensors, else one of the same ranks: agreement must not wait for a device."""
    if dist.get_backend(group) != "nccl":
        return group
    if group not in _cpu_groups:
        ranks = dist.get_process_group_ranks(group)
        _cpu_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _cpu_groups[group]


def _first_difference(a: str, b: str) -> str:
    for line, other in zip(a.splitlines(), b.splitlines(), strict=False):
        if line != other:
            return f"  the one:   {line}\n  the other: {other}"
    return f"  the one:   ...{a[-80:]}\n  the other: ...{b[-80:]}"
