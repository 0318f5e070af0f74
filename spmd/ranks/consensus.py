"""Consensus between the ranks of a mesh: all run the same program in one call, or all raise.

Every call starts with one tiny all_reduce on the CPU (``agree_on_program``), through shared memory where ranks are
connected: each rank contributes which program it is about to run, or that it must compile, or that it has failed. No
other collective can come between, since each rank's part in a call starts with it; so a rank never waits for a peer
that does something else. Compiled programs are then compared as text (``Agreement``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes import RankFailedError, RankMismatchError
from passes.runtime.peer_connection import PeerLostError

from .connection import Connection, connect, report_error
from .failures import StateIs, described
from .members import Members
from .patience import PATIENT, LateError
from .printed_errors import leave_to_first_rank
from .simulated import simulated
from .standing import ALONE, Standing
from .world import axis_names

AllGatherText = Callable[[str], list[str]]  # from this rank's text to those of all ranks, in the order of the mesh
COMPILE, FAILED = 1, 2  # sent in place of a program's identity
_SHOWN = 300  # characters of a line, in a message
_COMPARED = 20_000  # characters of a text in which the first difference is found; the whole text is compared by hash


def identity_of(what: str, text: str) -> int:
    """A number for a program, the same on every rank that compiled it."""
    return int(hashlib.sha256(f"{what}\n{text}".encode()).hexdigest()[:15], 16) | 16


class ProgramsDifferError(RankMismatchError):
    """Raised on all ranks. ``can_compile``: all are in a call of one step, and none has failed."""

    def __init__(self, message: str, can_compile: bool) -> None:
        super().__init__(message)
        self.can_compile = can_compile


@dataclass(frozen=True)
class MeshRanks:
    """The ranks of a mesh; ``groups``: the user's process groups along each axis, none where there is one rank only.

    ``timeout``: how many seconds a rank waits for the others to come; None: as long as a collective of theirs may take.
    """

    groups: tuple[Any, ...]
    members: Members
    timeout: float | None

    @classmethod
    def of(cls, mesh: DeviceMesh | None, timeout: float | None) -> MeshRanks:
        """The ranks of ``mesh``; where that is None, since it is not known yet, those of the world, if there is one."""
        if not dist.is_initialized() or dist.get_backend() == "fake":
            return cls((), Members((), ()), timeout)
        if mesh is None:
            size = dist.get_world_size()
            axes = (("dp", size),) if size > 1 else ()  # as ``world`` names it
            return cls((dist.group.WORLD,) * len(axes), Members(tuple(range(size)), axes), timeout)
        several = [k for k in range(mesh.ndim) if mesh.size(k) > 1]
        names = axis_names(mesh)
        members = Members(tuple(mesh.mesh.flatten().tolist()), tuple((names[k], mesh.size(k)) for k in several))
        return cls(tuple(map(mesh.get_group, several)), members, timeout)

    def connect(
        self, what: str, carried: Standing | None = None, partly: str = "", has_failed: bool = False
    ) -> Connection | None:
        """The connection of these ranks, which all of them make together; None where there is one rank only.

        ``carried``: the standing of state that was refused, maybe among the ranks of an earlier process group;
        ``partly``: why it is partly updated, if it is; ``has_failed``: the last call on it did.
        """
        if self.groups:
            ranks = self.groups, self.members, self.timeout
            return connect(*ranks, what, carried=carried, partly=partly, has_failed=has_failed)
        if carried is not None:
            carried.check(partly)
        return None

    def report_error(self, what: str, error: BaseException) -> None:
        """Let the ranks that come to ``what`` know why this one does not, without waiting for them."""
        if self.groups:
            report_error(self.groups, self.members, what, error)


def agree_on_program(
    connection: Connection | None,
    what: str,
    intent: int,
    describe: Callable[[], list[str]],
    timeout: float | None,
) -> None:
    """Wait until all ranks start this call. Raises ``ProgramsDifferError`` unless all have the same ``intent``.

    ``intent``: the identity of the program this rank is about to run, ``COMPILE`` or ``FAILED``. ``describe`` describes
    the call in lines, of which the message shows the first that differs.
    """
    if connection is None:
        ALONE.check()
        _count_call(_calls + 1)
        return
    connection.calls += 1
    with notifying(connection, what):
        largest, negated, calls = connection.all_reduce_max((intent, -intent, _calls + 1), what, timeout)
        _count_call(calls)  # whatever calls each rank made before
        connection.start_call(_calls)
        differ = largest != -negated
        texts = connection.all_gather_text(json.dumps([what, intent, describe()]), what) if differ else []
    if texts:
        raise _difference(texts, what, connection.members.ranks)
    connection.is_in_call = intent > FAILED or intent == COMPILE


def _difference(texts: Sequence[str], what: str, members: Sequence[int]) -> ProgramsDifferError:
    """The error that names the first line that differs between what ranks describe."""
    gathered = [json.loads(text) for text in texts]
    other = next(k for k, each in enumerate(gathered) if each != gathered[0])
    one, another = ("\n".join([name, *lines]) for name, _, lines in (gathered[0], gathered[other]))
    return ProgramsDifferError(
        f"expected all ranks to run the same program of {what} in one call, but rank {members[other]} "
        f"differs from rank {members[0]}:\n{_first_difference(one, another)}",
        can_compile=all(name == what and intent != FAILED for name, intent, _ in gathered),
    )


def call_number() -> int:
    """The number of the call that is being made, equal on all ranks that make it."""
    return _calls


def _count_call(number: int) -> None:
    global _calls
    _calls = number


@contextmanager
def notifying(connection: Connection, what: str) -> Iterator[None]:
    """Notify all ranks of what the body raises, at once; they raise, too. State is as before the call."""
    try:
        yield
    except BaseException as error:  # an interrupt, too
        notify(connection, what, error, StateIs.BEFORE)
        raise


def notify(connection: Connection | None, what: str, error: BaseException, state: StateIs) -> None:
    """Notify all ranks that a call raised ``error`` on this one, with its ``state``; they raise, too.

    Raises ``RankFailedError`` where the cause is on another rank.
    """
    if state is StateIs.MIXED:
        standing_of(connection).partly = f"{what} raised {described(error)}"
    if connection is None or connection.is_closed:
        return
    connection.fail(error, state)
    if isinstance(error, (PeerLostError, LateError)):
        raise RankFailedError(connection.explain(what)) from error
    error.add_note(f"{what} did not end on this rank; its state is {state.value}. All ranks were notified")


def standing_of(connection: Connection | None) -> Standing:
    """The standing of this rank's state among those of ``connection``; alone without one."""
    return ALONE if connection is None else connection.standing


@contextmanager
def all_or_none(what: str, connection: Connection | None) -> Iterator[Agreement]:
    """Compile ``what`` on all ranks or on none.

    The body compiles; the methods of the agreement wait for the others. If the body raises, the others raise, too.
    """
    agreement = Agreement(what, connection)
    try:
        yield agreement
    except Exception as error:
        if connection is None or agreement.is_reached:
            raise
        agreement.report_failure(error)
        connection.is_in_call = False  # all ranks know, and none has changed anything
        raise


class Agreement:
    """One attempt to compile, that all ranks have started. ``is_reached``: all have, and are about to change state.

    ``differing``: sentences on what ranks passed that differs, for the error if their programs do.
    """

    def __init__(self, what: str, connection: Connection | None) -> None:
        self.what, self.connection = what, connection
        self.is_reached = False
        self.differing: list[str] = []
        self._is_reported = False  # whether the others have this rank's part of the exchange that comes next

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part."""
        return self.connection is None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that compile together, in the order of the mesh."""
        return self.connection.members.ranks if self.connection is not None else (0,)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the first of them."""
        stands_for = simulated()
        if stands_for is not None:
            return stands_for.rank == 0
        return not dist.is_initialized() or dist.get_rank() == self.members[0]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's ``text``, in the order of the mesh. Raises ``RankMismatchError`` as ``agree`` does."""
        texts = [text for _, text in self._all_gather(["so far", text])]
        self._is_reported = False
        return texts

    def by_first_rank(self, work: Callable[[], bytes]) -> bytes:
        """The result of ``work`` on the first rank of the mesh, for which the others wait; empty there if it raises."""
        try:
            content = work() if self.is_first_rank else b""
        except Exception:
            self._broadcast(b"")
            raise
        return self._broadcast(content)

    def _broadcast(self, content: bytes) -> bytes:
        (_, length), *_ = self._all_gather(["so far", len(content)], PATIENT)
        self._is_reported = False
        if self.connection is None or not length:
            return content if self.connection is None else b""
        with notifying(self.connection, self.what):
            return self.connection.broadcast(content, length, f"the end of compiling {self.what}")

    def check_captured(self, text: str) -> None:
        """Raise ``RankMismatchError`` where ranks passed other values, and captured another program for that reason.

        ``text``: of this rank's program. What the step does not read may differ.
        """
        if not self.differing:
            return
        digests = self.all_gather_text(hashlib.sha256(text.encode()).hexdigest())
        if len({*digests}) > 1:
            passed = "; ".join(self.differing[:3])
            raise RankMismatchError(
                f"{self.what} depends on arguments that are not the same on all ranks: {passed}. Numbers and text must "
                "be equal on all: draw them from spmd.shared_rng(), which all ranks seed equally, or pass what is each "
                "rank's own as a tensor with a row for each row of the batch"
            )

    def agree(self, text: str, proposed: list[int], writes: bool = False) -> tuple[list[int], bool]:
        """Wait for all ranks; returns what rank 0 ``proposed``, and whether any rank ``writes``.

        Raises ``RankMismatchError`` if a rank failed, did not come, or came with another ``text``.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()
        gathered = self._all_gather(["ready", proposed, digest, text[:_COMPARED], writes])
        different = [k for k, other in enumerate(gathered) if other[2] != gathered[0][2]]
        if different and self.connection is not None:
            one, other = self.connection.members.ranks[0], self.connection.members.ranks[different[0]]
            raise RankMismatchError(
                f"expected {self.what} to be the same on all ranks, but rank {other} differs from rank {one}:\n"
                f"{_first_difference(gathered[0][3], gathered[different[0]][3])}"
                f"{_advice(gathered[0][3], gathered[different[0]][3])}"
            )
        self.is_reached = True
        return list(gathered[0][1]), any(other[4] for other in gathered)

    def _all_gather(self, values: list[Any], first_line: float | None = None) -> list[list[Any]]:
        """Every rank's ``values``: a state, and what belongs to it. Raises ``RankMismatchError`` if a rank failed."""
        self._is_reported = True
        if self.connection is None:
            return [values]
        gathered = self._gather(values, self.connection, first_line)
        for rank, (state, detail, *_) in zip(self.connection.members.ranks, gathered, strict=True):
            if state == "failed":
                raise RankMismatchError(f"{self.what} was not compiled on any rank, since rank {rank} failed: {detail}")
        return gathered

    def report_failure(self, error: Exception) -> None:
        """Let the others know, in the exchange that comes next, that this rank failed."""
        if self._is_reported or self.connection is None:
            return
        own = ["failed", f"{type(error).__name__}: {error}"[:_COMPARED]]
        with suppress(RankMismatchError):  # the connection is lost
            first, *_ = self._gather(own, self.connection)
            if first == own and not self.is_first_rank:
                leave_to_first_rank(error, self.members[0], dist.get_rank())

    def _gather(self, values: list[Any], connection: Connection, first_line: float | None = None) -> list[Any]:
        with notifying(connection, self.what):
            texts = connection.all_gather_text(json.dumps(values), f"the end of compiling {self.what}", first_line)
        return [json.loads(text) for text in texts]


_calls = 0  # the number of the last call, of any step


def _first_difference(a: str, b: str) -> str:
    for line, other in zip(a.splitlines(), b.splitlines(), strict=False):
        if line != other:
            at = next((k for k, pair in enumerate(zip(line, other, strict=False)) if len({*pair}) > 1), 0)
            return f"  the one:   {_around(line, at)}\n  the other: {_around(other, at)}"
    return f"  the one:   ...{a[-80:]}\n  the other: ...{b[-80:]}"


def _advice(a: str, b: str) -> str:
    """The advice where outputs differ: a step that logs on one rank alone computes what others do not have."""
    outputs = [[line for line in text.splitlines() if line.startswith("output ")] for text in (a, b)]
    if outputs[0] == outputs[1]:
        return ""
    return (
        "\nWhat a step returns, keeps, logs or prints of its values is computed on all ranks. Do so on each of them, "
        "and show it on one; or return the value, and log it outside of the step"
    )


def _around(line: str, at: int) -> str:
    """A line, and of a long one what stands around a position."""
    if len(line) <= _SHOWN:
        return line
    start = max(0, at - _SHOWN // 2)
    end = start + _SHOWN
    return f"{'...' * (start > 0)}{line[start:end]}{'...' * (end < len(line))}"
