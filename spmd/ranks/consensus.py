"""Agreement between the ranks of a mesh: all run the same program in one call, or all raise.

Every call begins with one tiny all_reduce on the CPU (``meet``), through memory where ranks are connected so: each rank
says which program it is about to run, or that it must compile, or that it has failed. No other collective can be in its
way, since each rank's part in a call begins with it; so a rank never waits for a peer that does something else. What is
compiled is then compared through the store (``Agreement``): ranks take their time to compile, and one that fails tells
the others.
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
from passes.runtime.shared_memory import disconnect, neighbours_of

from .._torch import default_store

Share = Callable[[str], list[str]]  # hands every rank of a mesh the texts of all, in the order of the mesh
_Said = tuple[int, int, int]
COMPILE, FAILED = 1, 2  # what a rank says instead of a program's identity
_SHOWN = 20_000  # characters of a text that are compared for the message; all of it is compared by hash


def identity_of(what: str, text: str) -> int:
    """A number for a program, the same on every rank that compiled it."""
    return int(hashlib.sha256(f"{what}\n{text}".encode()).hexdigest()[:15], 16) | 16


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh and how they talk; ``groups`` is empty where there is nobody to talk to."""

    groups: tuple[Any, ...]
    members: tuple[int, ...]
    timeout: float

    @classmethod
    def of(cls, mesh: DeviceMesh | None, timeout: float) -> Ranks:
        """``mesh`` None: the ranks are not known yet, so those of the world, if there is one."""
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return cls((), (), timeout)
        if mesh is None:
            return cls((on_cpu(dist.group.WORLD),), tuple(range(dist.get_world_size())), timeout)
        axes = [k for k in range(mesh.ndim) if mesh.size(k) > 1]
        return cls(tuple(on_cpu(mesh.get_group(k)) for k in axes), tuple(mesh.mesh.flatten().tolist()), timeout)

    def meet(self, what: str, intent: int, told: Callable[[], list[str]]) -> None:
        """Say what this rank is about to do in this call. Raises ``RankMismatchError`` unless all say the same.

        ``told`` describes the call in lines, for the message.
        """
        if not self.groups:
            return
        said = intent, -intent, _calls + 1
        for group in self.groups:
            said = self._largest(what, said, group, patient=intent > FAILED)
        self._begin(said[2])
        if said[0] != -said[1]:
            everyone = self.exchange(what, "\n".join([what, *told()]), self.timeout)
            other = next(k for k, text in enumerate(everyone) if text != everyone[0])
            raise RankMismatchError(
                f"expected all ranks to run the same program of {what} in one call, but rank {self.members[other]} "
                f"differs from rank {self.members[0]}:\n{_first_difference(everyone[0], everyone[other])}"
            )

    def _begin(self, call: int) -> None:
        """Number the call alike on all ranks, whatever calls each had before, for those who talk through memory."""
        global _calls
        _calls = call
        for group in self.groups:
            neighbours = neighbours_of(group.group_name, group)
            if neighbours is not None:
                neighbours.begin(call)

    def _largest(self, what: str, said: _Said, group: Any, patient: bool) -> _Said:
        """The maximum over a group. Who runs a program waits as long as for any collective; others wait less."""
        neighbours = neighbours_of(group.group_name, group)
        try:
            if neighbours is None:
                return self._largest_by_messages(said, group, patient)
            met = neighbours.meet(said, neighbours.timeout if patient else self.timeout)
            first, second, third = map(max, zip(*met, strict=True))
            return first, second, third
        except BaseException as error:  # an interrupt, too
            for each in self.groups:  # who waits for this rank along another axis is told
                disconnect(each.group_name)
            if not isinstance(error, (RuntimeError, TimeoutError)):
                raise
            raise RankMismatchError(
                f"rank {dist.get_rank()} could not agree with the others on {what}: {error}. Every rank must call each "
                "compiled step, in the same order; look at the output of the others for one that ended or branched off"
            ) from error

    def _largest_by_messages(self, said: _Said, group: Any, patient: bool) -> _Said:
        numbers = torch.tensor(said)
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

    def exchange(self, what: str, value: str, timeout: float) -> list[str]:
        """Every rank's value, in the order of the mesh, through the store."""
        keys, store = self.tell(value), default_store()
        try:
            store.wait(keys, timedelta(seconds=timeout))
            return [store.get(key).decode() for key in keys]
        except Exception as error:
            raise RankMismatchError(
                f"rank {dist.get_rank()} waited {timeout:.0f} s for all ranks at {what}, but not all came: look at the "
                "output of the others for one that ended or failed"
            ) from error

    def tell(self, value: str) -> list[str]:
        """Put this rank's value into the store; returns the keys under which all ranks put theirs."""
        store, rank = default_store(), dist.get_rank()
        mesh = hashlib.sha256(repr(self.members).encode()).hexdigest()[:8]
        # Counted in the store, so that a new process group starts anew.
        number = store.add(f"spmd/{mesh}/exchanges/{rank}", 1)
        store.set(f"spmd/{mesh}/exchange {number}/{rank}", value)
        return [f"spmd/{mesh}/exchange {number}/{member}" for member in self.members]


@contextmanager
def together(what: str, ranks: Ranks) -> Iterator[Agreement]:
    """Compile ``what`` on all ranks or on none.

    Inside, ``share`` and ``agree`` wait for the others. A rank that fails before tells them, so that none waits for it.
    """
    agreement = Agreement(what, ranks)
    try:
        yield agreement
    except BaseException as error:  # an interrupt, too
        agreement.fail(error)
        raise


class Agreement:
    """One attempt to compile, that all ranks have begun."""

    def __init__(self, what: str, ranks: Ranks) -> None:
        self.what, self.ranks, self._told = what, ranks, False
        self._begun = time.monotonic()

    def share(self, text: str) -> list[str]:
        """Every rank's ``text``, in the order of the mesh. Raises ``RankMismatchError`` as ``agree`` does."""
        if not self.ranks.groups:
            return [text]
        theirs = [told for _, told in self._everyone(["so far", text])]
        self._told = False
        return theirs

    def agree(self, text: str, proposed: list[int]) -> list[int]:
        """Wait for all ranks and return what rank 0 ``proposed``.

        Ranks do the same work: one that needs the timeout and more than twice as long as this one did is taken for
        gone. Raises ``RankMismatchError`` if a rank failed, did not come, or came with another ``text``.
        """
        if not self.ranks.groups:
            return proposed
        digest = hashlib.sha256(text.encode()).hexdigest()
        theirs = self._everyone(["ready", proposed, digest, text[:_SHOWN]])
        different = [k for k, other in enumerate(theirs) if other[2] != theirs[0][2]]
        if different:
            one, other = self.ranks.members[0], self.ranks.members[different[0]]
            raise RankMismatchError(
                f"expected {self.what} to be the same on all ranks, but rank {other} differs from rank {one}:\n"
                f"{_first_difference(theirs[0][3], theirs[different[0]][3])}"
            )
        return list(theirs[0][1])

    def _everyone(self, said: list[Any]) -> list[list[Any]]:
        """What each rank says, once all have come to say it."""
        self._told = True
        patience = self.ranks.timeout + 2 * (time.monotonic() - self._begun)
        theirs = [json.loads(told) for told in self.ranks.exchange(self.what, json.dumps(said), patience)]
        for rank, (state, told, *_) in zip(self.ranks.members, theirs, strict=True):
            if state == "failed":
                raise RankMismatchError(f"{self.what} was not compiled on any rank, since rank {rank} failed: {told}")
        return theirs

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank does not come."""
        if not self._told and self.ranks.groups:
            self._told = True
            self.ranks.tell(json.dumps(["failed", f"{type(error).__name__}: {error}"[:_SHOWN]]))


_calls = 0  # the number of the last call, of any step
_cpu_groups: dict[Any, Any] = {}


def on_cpu(group: Any) -> Any:
    """The group itself if it moves CPU tensors, else one beside it: an agreement must not wait for a device."""
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
