"""Dispatch: which program a call runs, agreed between the ranks before any of them begins.

Ranks that would run different programs raise in the same call, all of them, since every call starts with one exchange
(``ranks/consensus.py``). A call that no program fits is compiled, on all ranks or on none.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from passes import Program, RankMismatchError

from .annotations.no_sync import check_no_sync_is_inside
from .call.argument_logs import LogsFound
from .call.call import Call
from .call.compare_arguments import describe_shapes
from .call.found import with_found
from .call.initial_state import Idle
from .call.refuse_saves import refusal_of
from .call.rng import describe_seed
from .call.state import ArgumentReader, Arguments
from .call.unequal_rows import RowsOfResults, Split, UnequalRows, find_unequal_rows, inputs_of, restore, splits_of
from .capture import Captured
from .capture.sizes.size_symbols import TracedSizes
from .deferral import pending
from .guards.guards import Live
from .guards.leaves import Leaves
from .guards.recompiles import reason_to_compile
from .interpreter.source_lines import warn_user
from .live_numbers import LiveNumbers
from .options import Options
from .python_state.effects.carried import Carried
from .ranks.connection import Connection
from .ranks.consensus import (
    COMPILE,
    FAILED,
    AllGatherText,
    MeshRanks,
    ProgramsDifferError,
    agree_on_program,
    notifying,
)
from .ranks.failures import StateIs
from .running.compiled import Compiled, Restore
from .running.deferred_program import DeferredProgram
from .shared_captures import NONE, SharedCapture, SharedCaptures
from .state.edits import EditedError, compare_edits, number_of
from .unexpected_errors import unexpected_errors
from .unsharded import check_is_sharded

_ROOMS = (1.25, 1.5, 2.0, None)  # for rows of experts, as multiples of the ranks' mean; None: for all rows
_MANY = 8  # programs of one step, before it warns
_MOST_NODES = 100_000  # captured nodes of all programs that are kept of the sizes that one capture serves: 0.6 GB


@dataclass
class Turn:
    """One call of a step, as far as it has come: what the other ranks have to know should it fail.

    ``compiled`` is the program that fits the call, and ``live`` what it runs on; both None while there is none.
    ``rows``: of the batch, where ranks brought unequal numbers of them.
    ``connection``: of the ranks that make this call together, None where there is one. ``is_distributing``: live state
    is being made equal and split. ``made``: edits of state since the call before (``state/edits.py``).
    """

    call: Call | None = None
    rows: UnequalRows | None = None
    compiled: Compiled | None = None
    live: Live | None = None
    connection: Connection | None = None
    is_distributing: bool = False
    made: dict[int, int] = field(default_factory=dict)

    @property
    def state(self) -> StateIs:
        """The state of this rank."""
        if self.is_distributing:
            return StateIs.MIXED
        return self.compiled.executable.commit.state if self.compiled else StateIs.BEFORE

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have begun it, and none has ended it as far as this one knows."""
        return self.connection is None or self.connection.is_in_call


class Dispatch:
    """The programs of one step, in the order in which they were compiled, and the one last run.

    ``where``: the line of the step, for errors.
    """

    def __init__(self, name: str, function: Callable[..., Any], options: Options, where: str) -> None:
        self.name, self.options, self._where = name, options, where
        self.programs: list[Compiled] = []
        self.compiled = 0  # programs so far, those of models that are gone included
        self.last: Compiled | None = None
        self.outgrown = 0  # calls that had more rows of experts than there was room for
        self._room: float | None = _ROOMS[0]
        self._used: dict[str, int] = {}  # the captured nodes of programs, by name, those of the one last run at the end
        self._function, self._reader = function, ArgumentReader(inspect.signature(function))
        self.numbers = LiveNumbers(name)
        self._changes: dict[int, str] = {}  # the reason that each program was compiled for, by its id
        self.idle = Idle()  # parameters that the step was found not to update
        self.rows_of_results = RowsOfResults()
        self.shared = SharedCaptures(name, options.dynamic)
        self._known_splits: dict[tuple[tuple[str, int], ...], dict[str, Split]] = {}

    @property
    def graphs(self) -> list[Program]:
        """All that programs keep in memory."""
        return [graph for each in self.programs for graph in each.graphs]

    def begin(self, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the program for a call. Raises ``RankMismatchError`` on all ranks unless all choose the same.

        Where ranks have to compile, or differ, they may have brought unequal numbers of rows: then the batch is cut
        anew (``call/unequal_rows.py``). Ranks that would run one program have equal numbers of them.
        """
        with self._reporting_failure():
            given = self.read(args, kwargs)
            self.fit(turn, given)
            for each in self._pending(turn):
                each.check_pending()
            ranks = None if turn.compiled or turn.call is None else self.ranks_of(turn.call)
        assert turn.call is not None
        if ranks:
            turn.connection = ranks.connect(self.name, *refusal_of(turn.call.given))
        try:
            self._agree(turn)
        except ProgramsDifferError as error:
            if not error.can_compile:
                raise
            self._finish_pending(turn, None)  # also where this rank would have run it within the call
            if not self._cut_rows(turn, given):
                raise self._with_shapes(error, turn) from None
        else:
            self._finish_pending(turn, turn.compiled)
            if turn.compiled or not self._cut_rows(turn, given):
                return
        self._agree(turn)

    def deferred(self) -> list[DeferredProgram]:
        """The programs that leave their update to the next call."""
        return [each for each in self.programs if isinstance(each, DeferredProgram)]

    def _pending(self, turn: Turn) -> list[DeferredProgram]:
        """The programs that have an update of state of this call pending."""
        assert turn.call is not None, "a call that has begun was read"
        given = turn.call.given
        found = pending.pending_on([*given.modules.values(), *given.optimizers.values()])
        return [each for each in found if isinstance(each, DeferredProgram)]

    def _finish_pending(self, turn: Turn, steady: Compiled | None) -> None:
        """Finish the updates of state of this call that are pending, but for that of ``steady``; all ranks do."""
        for each in self._pending(turn):
            if each is steady:
                continue
            if each.connection is turn.connection:
                each.run_pending()
            else:
                each.finish_pending()

    def _with_shapes(self, error: ProgramsDifferError, turn: Turn) -> ProgramsDifferError:
        """The error, with what to do where the ranks brought tensors of different shapes. All ranks call this."""
        connection, call = turn.connection, turn.call
        if connection is None or call is None:
            return error
        with notifying(connection, self.name):
            gather = partial(connection.all_gather_text, what=self.name)
            found = describe_shapes(inputs_of(call), connection.members.ranks, gather)
        return ProgramsDifferError(f"{error}\n{found}", error.can_compile) if found else error

    def _agree(self, turn: Turn) -> None:
        """Wait until all ranks are about to do the same, on the same state."""
        try:
            self._agree_on_program(turn)
        except ProgramsDifferError as error:
            if not error.can_compile or not self._compare_edits(turn):
                raise
            self._agree_on_program(turn)
            return
        if turn.made and turn.compiled is not None and turn.compiled.edits.is_due(number_of(turn.made)):
            self._compare_edits(turn)

    def _compare_edits(self, turn: Turn) -> bool:
        """Compare state that some rank wrote to since the last call; returns whether any did. All ranks call this.

        Raises ``EditedError`` on all where it differs.
        """
        connection, compiled, live = turn.connection, turn.compiled, turn.live
        if connection is None:
            return False
        edits = compiled.edits if compiled is not None else None
        names, tensors = (edits.names, edits.tensors(live.tensors)) if edits and live else ([], [])
        with notifying(connection, self.name):
            gather = partial(connection.all_gather_text, what=self.name)
            ranks = connection.members.ranks
            written, unequal = compare_edits(self.name, names, tensors, [*turn.made], ranks, gather)
        if unequal:
            connection.is_in_call = False  # all ranks know, and none has changed anything
            raise EditedError(unequal)
        if edits and live:
            edits.note(live.tensors)
        return written

    def _agree_on_program(self, turn: Turn) -> None:
        """Wait until all ranks are about to do the same: to run the program that fits, or to compile."""
        intent, turn.made = COMPILE, {}
        if turn.compiled is not None:
            assert turn.call is not None and turn.live is not None, "a program fits a call that was read"
            with self._reporting_failure():
                if turn.connection is not None:
                    turn.made = turn.compiled.edits.made(turn.live.tensors)
                intent = turn.compiled.intent(turn.call.given, turn.live, number_of(turn.made))
        connection, timeout = turn.connection, self.options.timeout
        describe = partial(self._describe, turn)
        agree_on_program(connection, self.name, intent, describe, timeout)

    def _cut_rows(self, turn: Turn, given: Arguments) -> bool:
        """Compare the rows of all ranks, and cut the batch anew if they are unequal; returns whether they are."""
        connection, call = turn.connection, turn.call
        if connection is None or call is None:
            return False
        with notifying(connection, self.name):
            all_gather_text = partial(connection.all_gather_text, what=self.name)
            splits = self._splits(given, call)
            turn.rows = find_unequal_rows(given, splits, call.mesh, connection.members.ranks, all_gather_text)
            if turn.rows is None:
                return False
            given = turn.rows.cut(given, partial(connection.exchange, what=f"the rows of {self.name}"))
        connection.is_in_call = False  # until all agree again
        with self._reporting_failure():
            self.fit(turn, given)
        return True

    def _splits(self, given: Arguments, call: Call) -> dict[str, Split]:
        """How the arguments are split, found once for arguments of the same names and numbers of dims."""
        key = tuple((leaf.name, leaf.value.ndim) for leaf in given.tensors())
        if not self._known_splits.get(key):
            self._known_splits[key] = splits_of(call)
        return self._known_splits[key]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call. Raises ``TypeError`` as the function itself would."""
        return self._reader.read(args, kwargs)

    def fit(self, turn: Turn, given: Arguments) -> None:
        """Find the program that this rank would run; the one last run is asked first.

        Where there is none, find what the call uses besides its arguments, to compile one.
        """
        with unexpected_errors("finding the program", self.name, self._where):
            self._fit(turn, given)

    def _fit(self, turn: Turn, given: Arguments) -> None:
        mode, uneven = self.options.mode, turn.rows.uneven if turn.rows else {}
        check_no_sync_is_inside(self.name)
        check_is_sharded(given.modules.values())
        turn.call, turn.compiled, turn.live = Call(given, mode, uneven), None, None
        last = [self.last] if self.last else []
        for compiled in [*last, *(each for each in self.programs if each is not self.last)]:
            admits = compiled.is_of_this_world() and compiled.is_connected() and compiled.uneven == uneven
            admits = admits and not compiled.left
            admitted = compiled.guards.admit(given) if admits else None
            if admitted is not None:
                arguments, turn.live = admitted
                turn.call = Call(arguments, mode, uneven) if arguments is not given else turn.call
                compiled.executable.commit.start(compiled.connection)
                turn.compiled, turn.connection = compiled, compiled.connection
                return
        arguments = with_found(self._function, given)
        check_is_sharded(arguments.modules.values())
        turn.call = Call(arguments, mode, uneven)
        turn.call.no_logs = self._reader.no_logs

    def ranks_of(self, call: Call) -> MeshRanks:
        """The ranks that a call compiles with."""
        return MeshRanks.of(call.device_mesh, self.options.timeout)

    def carried(self, call: Call) -> Carried:
        """The Python state that the programs so far write, of the models of a call: what may be inputs of the next."""
        return self.numbers.carried(compiled.captured for compiled in self._own(call))

    def find_capture(self, call: Call, all_gather_text: AllGatherText) -> tuple[SharedCapture | None, Carried]:
        """The capture that serves a call, if there is one on all ranks, and the numbers that a new one takes as inputs.

        These are the Python numbers that have changed since the step was compiled, on any rank: the next program reads
        them at each call.
        """
        if not self.compiled:
            return None, self.numbers.of_first(call)
        sites, changed = self.numbers.changes(call, self._own(call))
        own = json.dumps([self.shared.number_for(call), changed])
        gathered = [json.loads(text) for text in all_gather_text(own)]
        live = self.numbers.of_next(call, sites, [name for _, names in gathered for name in names])
        numbers = {number for number, _ in gathered}
        is_shared = len(numbers) == 1 and numbers != {NONE}
        return self.shared.of_number(*numbers) if is_shared else None, live

    def why_not_cached(self, call: Call) -> str:
        """Why no entry of the cache can serve a call: what an earlier call of this process had decides, too."""
        reasons = {
            "its experts had more rows than it had room for": self.outgrown,
            "its schedule follows what was measured": self.last is not None and bool(self.last.left),
            "it has logs among its arguments": self._reader.logs,
            "the programs so far write to Python state": self.carried(call),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def open_sizes(self, call: Call) -> TracedSizes:
        """The sizes of arguments that the next capture leaves open."""
        return self.shared.open_sizes(call, [each.captured for each in self._own(call)])

    def captures(self, call: Call) -> list[Captured]:
        """The captures of the models of a call, the newest first."""
        return [each.captured for each in reversed(self._own(call))]

    def note_logs(self, call: Call, found: LogsFound) -> None:
        """Read the arguments of a call anew, where containers among them are logs, or are none after all."""
        reader = self._reader
        if found.are_logs:
            reader.logs |= found.paths
        else:
            reader.logs -= found.paths
            reader.no_logs |= found.paths
        call.no_logs = reader.no_logs
        tensors = {leaf.name: leaf for leaf in call.given.tensors()}  # rows may have been exchanged
        given = reader.read(*call.given.given)
        given = replace(given, leaves=[tensors.get(leaf.name, leaf) for leaf in given.leaves])
        call.read_again(with_found(self._function, given))

    def _own(self, call: Call) -> list[Compiled]:
        """The programs of the models of a call."""
        return [each for each in self.programs if not each.guards.dead and each.guards.shares_owners_with(call.given)]

    def cleared_first(self, call: Call) -> frozenset[str]:
        """The parameters whose gradient the programs so far clear before they read it, of the models of a call."""
        return frozenset[str]().union(*(compiled.captured.cleared_first for compiled in self._own(call)))

    @property
    def room(self) -> float | None:
        """The room for rows of experts in the next program: for all where a call cannot begin anew with more."""
        mode = self.options.mode
        if mode.defer_updates or mode.micro_batches > 1 or mode.has_stages or self.options.cuda_graphs:
            return None
        return self._room

    def notes_on_room(self, local: Program) -> list[str]:
        """A sentence for the report."""
        if local.room is None and not self.outgrown:
            return []
        room = f"{local.room} times the mean of its ranks" if local.room is not None else "all of them"
        calls = f"{self.outgrown} call{'s' * (self.outgrown != 1)}"
        return [f"rows of experts: a rank has room for {room}; {calls} had more, and ran again with more room"]

    def outgrow(self, turn: Turn, compiled: Compiled, times: float) -> None:
        """Let a call that has changed nothing run a program with ``times`` the room or more; all ranks call this."""
        assert turn.call is not None and compiled.program.room is not None, "a call that has begun was read"
        self.outgrown += 1
        needed = compiled.program.room * times
        self._room = next((room for room in _ROOMS if room is None or room >= needed), None)
        self.leave(turn, compiled, "a rank's experts had more rows than there was room for")

    def leave(self, turn: Turn, compiled: Compiled, why: str) -> None:
        """Let a call that has changed nothing run another program, as all later ones; all ranks call this."""
        assert turn.call is not None, "a call that has begun was read"
        compiled.abandon(why)
        self.fit(turn, turn.call.given)

    def restore(self, turn: Turn) -> Restore | None:
        """A function that returns the rows of results to the ranks that brought them; None where all have theirs."""
        if turn.rows is None or turn.connection is None or turn.compiled is None:
            return None
        exchange = partial(turn.connection.exchange, what=f"the results of {self.name}")
        dims = self.rows_of_results.of(turn.compiled.captured, turn.compiled.program)
        return partial(restore, rows=turn.rows, program=turn.compiled.program, dims=dims, exchange=exchange)

    def reason_to_compile(self, call: Call) -> str:
        """The reason to compile, in the user's words."""
        return reason_to_compile(call, self.last, self._own(call))

    def add(self, compiled: Compiled, change: str, call: Call) -> None:
        """Keep a new program, compiled for a call since ``change``; warn if its model has many.

        Programs of models, process groups and connections that are gone are dropped: when that is noticed depends on
        each rank's garbage collector, so nothing that ranks agree on may depend on ``programs``.
        """
        self.compiled += 1
        if compiled.any_size is not None:
            self.shared.add(self.compiled, compiled.any_size, compiled.guards, call)
        self.programs = [*(each for each in self.programs if each.is_alive()), compiled]
        self._changes = {id(each): self._changes.get(id(each), change) for each in self.programs}
        of_model = [each for each in self.programs if each.guards.has_owners_of(compiled.guards)]
        sizes = sum(each.is_of_one_size for each in of_model)
        if sizes == _MANY and compiled.is_of_one_size:
            warn_user(
                f"{self.name} has compiled {sizes} programs that differ in sizes of arguments alone; the last one: "
                f"{change}. Each size takes a program, which is cheaper than the first, not free: pad to a few lengths "
                "(the next multiple of 64, say), or group rows of one length"
            )
        of_model = [each for each in of_model if not each.is_of_one_size]
        if len(of_model) == _MANY and not compiled.is_of_one_size:
            changes = [self._changes[id(each)] for each in of_model[-3:]]
            warn_user(
                f"{self.name} has compiled {_MANY} programs. The last ones were compiled because this changed: "
                f"{'; '.join(changes)}. Pass what changes at every call as a tensor, or leave it out"
            )

    def use(self, compiled: Compiled) -> None:
        """Note that a call runs a program; of more than ``max_programs``, the one that was run longest ago goes.

        Where the user names no number, those count that are cheap to make again, since their capture is kept, by the
        memory that they take. Programs of models that are gone count, too, since ranks notice at different times that a
        model is gone.
        """
        counts = self.options.max_programs is not None or compiled.is_of_one_size
        if compiled is self.last or not counts:
            self.last = compiled
            return
        self.last, name = compiled, compiled.program.name
        self._used.pop(name, None)
        self._used[name] = compiled.captured.program.node_count
        while self._keeps_too_many():
            oldest = next(iter(self._used))
            del self._used[oldest]
            for each in [each for each in self.programs if each.program.name == oldest]:
                self.programs.remove(each)
                each.drop()

    def _keeps_too_many(self) -> bool:
        if self.options.max_programs is not None:
            return len(self._used) > self.options.max_programs
        return len(self._used) > 1 and sum(self._used.values()) > _MOST_NODES

    def _describe(self, turn: Turn) -> list[str]:
        """The call in lines, for ranks that differ to find the first difference."""
        assert turn.call is not None
        lines = Leaves.of(turn.call.given).describe()
        lines += [f"{each.name}: {type(each.value).__name__}" for each in turn.call.given.found]
        if turn.compiled is not None:
            assert turn.live is not None, "a program fits a call that was read"
            values = turn.compiled.describe_values(turn.call.given, turn.live)
            before = ["finishes the update of the call before"] if turn.compiled.has_pending else []
            return [*lines, *before, *values, f"runs {turn.compiled.program.name}", describe_seed()]
        return [*lines, f"has to compile because of {self.reason_to_compile(turn.call)}"]

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._report_failure(error)
            raise

    def _report_failure(self, error: BaseException) -> None:
        """Report to the other ranks, which wait for this call to begin, that it failed before it could."""
        ranks = MeshRanks.of(
            self.options.mode.mesh or (self.last.device_mesh if self.last else None), self.options.timeout
        )
        if not isinstance(error, Exception):  # an interrupt
            ranks.report_interrupt(self.name, error)
            return
        message = f"failed: {type(error).__name__}: {error}"
        with suppress(RankMismatchError):
            agree_on_program(ranks.connect(self.name), self.name, FAILED, lambda: [message], self.options.timeout)
