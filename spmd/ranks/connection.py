"""The connection between the ranks of a mesh: gloo groups of our own, in which ranks agree and programs communicate.

They are not the user's groups, so that a call that fails can close them at once: that is how its peers learn of it,
wherever they wait, and nothing is left pending in a group that anybody else uses. The next call connects anew. Only to
connect, ranks use the user's groups, with two collectives along each axis: when they have arrived, and when they have
written the addresses at which the others reach them.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from passes import RankFailedError, RankMismatchError
from passes.runtime.gloo import close_group, is_done
from passes.runtime.local_peers import abort_local_peers, local_peers_of
from passes.runtime.peer_connection import PeerLostError, Triple

from .._torch import default_store, new_gloo_group, set_timeout, timeout_of
from ..interpreter.interrupts import deferred_signals
from .failures import Failure, FailureBoard, StateIs
from .members import Members
from .patience import LateError, Patience
from .standing import PARTLY, WAY_OUT, Standing, StateError, check_equal
from .watched_store import WatchedStore
from .world import ranks_of_part, restarts

_JOINS, _RAISES = "joins", "raises"  # the ranks that come to a call after their connection was closed
CONNECTING = 20.0  # seconds for ranks that know the addresses of all others to connect to them


class Connection:
    """One connection, until a call fails. ``groups``: along each axis of several ranks, in the order of the mesh.

    ``timeout``: seconds that a collective may take.
    """

    def __init__(self, name: str, groups: Sequence[Any], members: Members, timeout: float, standing: Standing) -> None:
        self.groups, self.members, self.timeout, self.standing = tuple(groups), members, timeout, standing
        self.is_closed = False
        self.standings: list[Standing] = []  # of all ranks, when they connected, in the order of the mesh
        self.all_recover = False  # whether all of them had come to recover their state
        self.is_in_call = False  # between the agreement on a call and its end
        self.calls = 0  # that have begun here, this rank's last one included: equal on all ranks
        self._world = weakref.ref(dist.group.WORLD)
        self._name, self._store = name, default_store()
        self.board = FailureBoard(self._store, name, members)
        self._subgroups: dict[tuple[int, ...], Any] = {}  # by their ranks
        self._exchanges: tuple[Any, ...] = ()  # groups in which calls begin, where it is not ``groups``
        self._opened = 0
        self._waits = 0  # equal on all ranks, since they wait for each other in the same order

    @property
    def is_open(self) -> bool:
        """Whether ranks can still communicate in it: no call has failed, and the process group is there."""
        return not self.is_closed and dist.is_initialized() and dist.group.WORLD is self._world()

    def all_reduce_max(self, values: Triple, what: str, timeout: float | None = None) -> Triple:
        """The maximum of three integers over all ranks, which wait for each other."""
        for group, exchange in zip(self.groups, self._exchanges or self.groups, strict=True):
            peers = local_peers_of(group.group_name, group)
            if peers is None:
                first, second, third = self._all_reduce(torch.tensor(values), exchange, what, timeout).tolist()
            else:
                gathered = peers.barrier(values, self._patience(what, timeout).wait)
                first, second, third = map(max, zip(*gathered, strict=True))
            values = first, second, third
        return values

    def separate_exchange(self) -> tuple[Any, ...]:
        """Let ranks wait for each other past what a call left in flight: in other groups along each axis, returned.

        A gloo group works on one collective after the other. All ranks call it.
        """
        if not self._exchanges:
            found = [tuple(dist.get_process_group_ranks(group)) for group in self.groups]
            self._exchanges = tuple(map(self._new_group, found))
        return self._exchanges

    def subgroup(self, group: Any, size: int) -> Any:
        """The group of ``size`` ranks that follow each other in ``group``, this one among them; all ranks call it."""
        return self._group_of(tuple(ranks_of_part(group, size)))

    def _group_of(self, ranks: tuple[int, ...]) -> Any:
        """The group of ``ranks``, this one among them; all ranks call it, each for its own."""
        for group in self.groups:
            if tuple(dist.get_process_group_ranks(group)) == ranks:
                return group
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._new_group(ranks)
        return self._subgroups[ranks]

    def _new_group(self, ranks: tuple[int, ...]) -> Any:
        self._opened += 1  # as on all ranks, also where they failed to open one
        name = f"{self._name}/{'-'.join(map(str, ranks))}/{self._opened}"
        with self.watched_store(name) as store:
            group = new_gloo_group(name, ranks.index(dist.get_rank()), list(ranks), store, CONNECTING)
        set_timeout(group, self.timeout)
        return group

    @contextmanager
    def watched_store(self, name: str) -> Iterator[Any]:
        """A store in which each rank opens one gloo group; all ranks call it. ``name``: equal on all, and used once.

        A rank that waits for the addresses of others passes a barrier of all ranks first, and so learns of one that
        fails, or ends.
        """
        patience = Patience("open a group", name, self.members, self.timeout, self._store, self._check)
        has_passed = False

        def pass_barrier() -> None:
            nonlocal has_passed
            if not has_passed:
                has_passed = True
                self.all_reduce_max((0, 0, 0), "open a group")

        def wait_for(keys: list[str]) -> None:
            pass_barrier()
            patience.wait_for_keys(keys)

        yield WatchedStore(self._store, wait_for)
        pass_barrier()  # a group of one has waited for nobody

    def exchange(
        self, given: torch.Tensor, sent: list[int], received: list[int], ranks: tuple[int, ...], what: str
    ) -> torch.Tensor:
        """Exchange with ``ranks``; returns what each has for this one. All ranks call it, each with its own ``ranks``.

        ``given``: bytes, (all of ``sent``,), of which each gets its own; ``received``: the number from each.
        """
        taken = torch.empty(sum(received), dtype=torch.uint8)
        group = self._group_of(ranks)
        work = dist.all_to_all_single(taken, given.cpu(), received, sent, group=group, async_op=True)
        self._patience(what).wait(partial(is_done, work))
        return taken.to(given.device)

    def barrier(self) -> None:
        """Wait for all ranks in the middle of a call."""
        self.all_reduce_max((0, 0, 0), "the end of this call")

    def start_call(self, call: int) -> None:
        """Give a call the same number on all ranks, where they share memory."""
        for group in self.groups:
            peers = local_peers_of(group.group_name, group)
            if peers is not None:
                peers.start_call(call)

    def all_gather_text(self, text: str, what: str, first_line: float | None = None) -> list[str]:
        """Every rank's ``text``, in the order of the mesh. ``first_line``: seconds until a log says who is missing."""
        rows = [text.encode()]
        for group in reversed(self.groups):  # from the innermost axis on
            rows = self._all_gather(rows, group, what, first_line)
        return [row.decode() for row in rows]

    def broadcast(self, content: bytes, length: int, what: str) -> bytes:
        """The ``content`` of the first rank of the mesh, on every rank; its ``length`` is known to all."""
        taken = torch.frombuffer(bytearray(content.ljust(length)), dtype=torch.uint8)
        for group in self.groups:  # from the outermost axis on: the first rank of a group has it, or none of them yet
            work = dist.broadcast(taken, group=group, group_src=0, async_op=True)
            self._patience(what).wait(partial(is_done, work))
        return taken.numpy().tobytes()

    def _all_gather(self, rows: list[bytes], group: Any, what: str, first_line: float | None) -> list[bytes]:
        lengths = torch.zeros(group.size(), len(rows), dtype=torch.int64)
        lengths[group.rank()] = torch.tensor([len(row) for row in rows])
        lengths = self._all_reduce(lengths, group, what, first_line=first_line)
        longest = max(1, int(lengths.sum(1).max()))
        mine = torch.frombuffer(bytearray(b"".join(rows).ljust(longest)), dtype=torch.uint8)
        parts = torch.empty(group.size() * longest, dtype=torch.uint8)
        work = group.allgather_into_tensor_coalesced([parts], [mine])
        self._patience(what).wait(partial(is_done, work))
        return [
            bytes(row.tolist())
            for part, sizes in zip(parts.split(longest), lengths.tolist(), strict=True)
            for row in part[: sum(sizes)].split(sizes)
        ]

    def _all_reduce(
        self, values: torch.Tensor, group: Any, what: str, timeout: float | None = None, first_line: float | None = None
    ) -> torch.Tensor:
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
        self._patience(what, timeout, first_line).wait(partial(is_done, work))
        return values

    def _patience(self, what: str, timeout: float | None = None, first_line: float | None = None) -> Patience:
        self._waits += 1
        seconds, name = self.timeout if timeout is None else timeout, f"{self._name}/{self._waits}"
        return Patience(what, name, self.members, seconds, self._store, self._check, first_line)

    def _check(self) -> None:
        if self.board.has_any():
            raise PeerLostError("the call of another rank failed")

    def compare(self, what: str, recovers: bool, partly: str) -> None:
        """Find out how the state of every rank stands, and whether all ranks have come to recover it.

        ``partly``: why that of this call is partly updated.
        """
        own = replace(self.standing, partly=partly or self.standing.partly)
        gathered = map(json.loads, self.all_gather_text(json.dumps([recovers, asdict(own)]), what))
        purposes, standings = zip(*gathered, strict=True)
        self.all_recover, self.standings = all(purposes), [Standing(**standing) for standing in standings]

    def fail(self, error: BaseException, state: StateIs) -> None:
        """Report to all ranks that a call failed on this one, and close the connection, so that who waits raises."""
        if not self.is_closed:
            with suppress(Exception):  # the store may be gone, with the rank that held it
                lost = isinstance(error, PeerLostError)
                self.board.publish(Failure.of(error, state, lost, self.calls, self.standing))
            self.close()

    def is_awaited(self) -> bool:
        """Whether ranks whose call failed wait for this rank's call, which has raised here before all had begun it.

        If not, this one raises, and such a rank learns of that. Only the word that is settled decides: all ranks that
        are here in time have reported that they lost the others, whether they join these ranks or not.
        """
        with suppress(Exception):  # as above
            is_ahead = any(each.call < self.calls for each in self.board.read() if each.rank != dist.get_rank())
            if self.is_closed and is_ahead and self._settle(self.calls, _RAISES) == _JOINS:
                self.calls -= 1  # this call is one of the next connection
                return True
        return False

    def follow(self, partly: str) -> None:
        """Begin a call on state of one that failed here: ranks that had ended that one join this one, once they come.

        Raises ``StateError`` if such a rank has come, and raised, and state is not whole or not the same: that rank is
        a call ahead, and would not be met again. ``partly``: why the state of this call is partly updated.
        """
        number, found = self.calls + 1, dict[int, Standing]()
        with suppress(Exception):  # without the store, ranks cannot connect either, and that says why
            if self._settle(number, _JOINS) == _JOINS:
                return
            found = {each.rank: each.standing for each in self.board.read() if each.call >= number}
        found[dist.get_rank()] = replace(self.standing, partly=partly or self.standing.partly)
        self.calls = number
        check_equal(self.standing, [found[rank] for rank in sorted(found)], sorted(found))

    def _settle(self, number: int, proposed: str) -> str:
        """Settle what all ranks do that come to a call of this ``number``: what the first of them ``proposed``."""
        key = f"{self._name}/call/{number}"
        with deferred_signals():  # or nobody would say what the first one proposed
            if self._store.add(f"{key}/ranks", 1) == 1:
                self._store.set(key, proposed)
        return str(self._store.get(key).decode())

    def close(self) -> None:
        """Close it on all ranks."""
        self.is_closed = True
        for group in (*self.groups, *self._subgroups.values(), *self._exchanges):
            abort_local_peers(group.group_name)
            with suppress(Exception):  # the user may have destroyed all groups already
                close_group(group)
                dist.destroy_process_group(group)

    def explain(self, what: str) -> str:
        """The sentence about a call that failed here because of another rank, which is waited for to say why."""
        with suppress(Exception):
            return self.board.explain(what, self.board.wait())
        return f"{what} did not end: the store of the process group has gone, with the rank that held it"


@dataclass
class _Ranks:
    """The ranks of some of the user's groups, as long as these exist."""

    theirs: tuple[weakref.ref[Any], ...]
    connection: Connection | None = None
    standing: Standing = field(default_factory=Standing)

    def open_connection(self) -> Connection | None:
        """The connection last made, if ranks can still communicate in it."""
        return self.connection if self.connection is not None and self.connection.is_open else None

    def carry_over(self, standing: Standing) -> str:
        """Let ``standing``, which state got among the ranks of an earlier process group, be compared among these.

        Returns why that is too late, if these are connected already, with other state.
        """
        if standing is self.standing:
            return ""
        self.standing = standing
        return f"{standing.describe()}, of an earlier process group"


_known: dict[tuple[str, ...], _Ranks] = {}  # by the names of the user's groups
_attempts = weakref.WeakKeyDictionary[Any, Counter[str]]()  # by process group: the attempts of each set of ranks


def connect(
    theirs: Sequence[Any],
    members: Members,
    timeout: float | None,
    what: str,
    *,
    carried: Standing | None = None,
    partly: str = "",
    has_failed: bool = False,
    to_recover: bool = False,
) -> Connection:
    """The open connection of the ranks ``members``, else a new one. ``theirs``: the user's groups, one per axis.

    ``carried``: the standing of state that was refused, maybe among the ranks of an earlier process group; ``partly``:
    why it is partly updated, if it is. ``has_failed``: the last call on this state did.
    Where one on other state did, a rank that had ended that one may raise in this call alone (docs/limits.md).

    Waits for all ranks to come to ``what``. Raises ``RankMismatchError`` if one does not come or fails meanwhile, and
    ``StateError`` if the state of the ranks is not whole or not the same, unless all of them come ``to_recover`` it.
    """
    known, refused = _ranks_of(theirs), f"{PARTLY} ({partly})" if partly and not to_recover else ""
    if carried is not None and not partly:  # which would be known of its own models alone
        refused = known.carry_over(carried)
    if (found := known.open_connection()) is not None:
        if not refused:
            return found
        error = StateError(f"this state is {refused}. {WAY_OUT}", known.standing)
        report_error(theirs, members, what, error)
        raise error
    if has_failed and not to_recover and known.connection is not None and known.connection.is_closed:
        known.connection.follow(partly)
    longest = min(map(timeout_of, theirs))
    known.connection = None
    with ExitStack() as failures:
        with deferred_signals():  # of the user's groups, all ranks have to call as many collectives
            rendezvous = _Rendezvous(theirs, members, longest if timeout is None else timeout, what)
            failures.enter_context(rendezvous.reporting_failure())
            failures.callback(rendezvous.leave)
            arrivals = rendezvous.arrive()
        made = rendezvous.connect(arrivals, longest, known)
    try:
        made.compare(what, to_recover, partly)
    except BaseException as error:
        made.fail(error, StateIs.BEFORE)
        if isinstance(error, (PeerLostError, LateError)):
            raise RankFailedError(made.explain(what)) from error
        raise
    try:
        check_equal(known.standing, [] if made.all_recover else made.standings, members.ranks)
    except StateError:
        made.close()
        raise
    known.connection = made
    return made


def report_error(theirs: Sequence[Any], members: Members, what: str, error: BaseException) -> None:
    """Let the ranks that come to ``what`` know why this one does not, without waiting for them."""
    known = _ranks_of(theirs)
    if (found := known.open_connection()) is not None:
        found.calls += 1
        found.fail(error, StateIs.BEFORE)
        if not found.is_awaited():
            return
    known.connection = None
    with deferred_signals():
        rendezvous = _Rendezvous(theirs, members, 0.0, what)
        rendezvous.board.publish(Failure.of(error, StateIs.BEFORE, lost=False))
        rendezvous.arrive()
        rendezvous.leave()


def _ranks_of(theirs: Sequence[Any]) -> _Ranks:
    key = tuple(group.group_name for group in theirs)
    known = _known.get(key)
    if known is None or [ref() for ref in known.theirs] != list(theirs):  # names are used again, groups are not
        known = _known[key] = _Ranks(tuple(weakref.ref(group, lambda _: _known.pop(key, None)) for group in theirs))
    return known


class _Rendezvous:
    """An attempt to connect. These ranks have all made the same number of attempts before, in meshes of this shape."""

    def __init__(self, theirs: Sequence[Any], members: Members, timeout: float, what: str) -> None:
        self.theirs, self.members, self.what = theirs, members, what
        self.name, self.store = _next_name([group.size() for group in theirs], members), default_store()
        self.board = FailureBoard(self.store, self.name, members)
        self.patience = Patience(what, self.name, members, timeout, self.store, self._check)
        self._awaited: list[Any] = []  # groups of the user whose second collective this rank has not begun yet

    def connect(self, arrivals: Sequence[Callable[[float], bool]], timeout: float, known: _Ranks) -> Connection:
        """Wait for ``arrivals``, which ``arrive`` returned, and open groups; ``timeout``: of collectives in these."""
        self._wait_for_arrivals(arrivals)
        groups = [self._open(axis, group) for axis, group in enumerate(self.theirs)]
        for group in groups:
            set_timeout(group, timeout)
        return Connection(self.name, groups, self.members, timeout, known.standing)

    def _wait_for_arrivals(self, arrivals: Sequence[Callable[[float], bool]]) -> None:
        for have_arrived in arrivals:
            self.patience.wait(have_arrived)
        self._check()

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Let the other ranks know what the body raises."""
        try:
            yield
        except BaseException as error:
            others_failed = self.board.has_any()
            self.board.publish(Failure.of(error, StateIs.BEFORE, others_failed or isinstance(error, PeerLostError)))
            if not isinstance(error, (RuntimeError, LateError)):
                raise
            if isinstance(error, LateError) and not others_failed:
                raise RankMismatchError(self._cause(error)) from error
            raise RankFailedError(self.board.explain(self.what, self.board.wait())) from error

    def _cause(self, error: BaseException) -> str:
        return (
            f"rank {dist.get_rank()} could not agree with the others on {self.what}: {error}. Every rank must call "
            "each compiled step, in the same order; look at the output of the others for one that ended or branched off"
        )

    def arrive(self) -> list[Callable[[float], bool]]:
        """Arrive along all axes; returns what waits for the others along each.

        A rank that gives up has arrived, too, so that what the others began in the user's groups does not stay pending.
        """
        self.store.set(self._arrival_key(dist.get_rank()), "")
        self._awaited = [group for group in self.theirs if has_gloo(group)]
        return [_all_reduce_in(group) if has_gloo(group) else self._all_arrived for group in self.theirs]

    def leave(self) -> None:
        """Begin what ``connect`` has not begun in the user's groups, since it failed."""
        with deferred_signals():
            while self._awaited:
                _all_reduce_in(self._awaited.pop())

    def _all_arrived(self, seconds: float) -> bool:
        return self.patience.are_there([self._arrival_key(member) for member in self.members.ranks], seconds)

    def _arrival_key(self, member: int) -> str:
        return f"{self.name}/arrived/{member}"

    def _open(self, axis: int, group: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        store = WatchedStore(self.store, partial(self._wait_for_addresses, group))
        return new_gloo_group(f"{self.name}/{axis}/{ranks[0]}", group.rank(), ranks, store, CONNECTING)

    def _wait_for_addresses(self, group: Any, keys: list[str]) -> None:
        """Wait for ``keys``, which the ranks of ``group`` write; this rank has written its own."""
        if group in self._awaited:
            with deferred_signals():
                self._awaited.remove(group)
                all_have_written = _all_reduce_in(group)
            self.patience.wait(all_have_written)
        self.patience.wait_for_keys(keys)

    def _check(self) -> None:
        if self.board.has_any():
            raise PeerLostError("another rank failed")


def _all_reduce_in(group: Any) -> Callable[[float], bool]:
    """Begin a collective in a group of the user; returns what waits for it. gloo notices when a rank has ended."""
    return partial(is_done, dist.all_reduce(torch.zeros(1), group=group, async_op=True))


def _next_name(sizes: list[int], members: Members) -> str:
    """The name of the attempt that begins now, equal on all ranks, and used once in a process group.

    ``torchrun --max-restarts`` starts all ranks anew with the store of those before, and with failures in it. On
    several nodes, where restarts are not known, these are raised.
    """
    mesh = hashlib.sha256(repr([sizes, list(members.ranks)]).encode()).hexdigest()[:8]
    attempts = _attempts.setdefault(dist.group.WORLD, Counter())
    attempts[mesh] += 1
    return f"spmd/{restarts()}/{mesh}/{attempts[mesh]}"


def has_gloo(group: Any) -> bool:
    """Whether ``group`` moves CPU tensors by gloo."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get("cpu") == "gloo"
