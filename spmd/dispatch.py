"""Dispatch: which program a call runs, agreed between the ranks before any of them begins.

Ranks that would run different programs raise in the same call, all of them, since every call starts with one exchange
(``ranks/consensus.py``). A call that no program fits is compiled, on all ranks or on none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from passes import RankFailedError, RankMismatchError

from .annotations.no_sync import check_no_sync_is_inside
from .answers.answer import Answers, begin_with, with_other
from .call.call import Call
from .call.compare_arguments import describe_shapes
from .call.found import with_found
from .call.refuse_saves import has_failed, refusal_of
from .call.rng import describe_seed
from .call.state import ArgumentReader, Arguments
from .call.unequal_rows import RowsOfResults, Split, UnequalRows, find_unequal_rows, inputs_of, restore, splits_of
from .deferral import pending
from .guards.guards import Live
from .guards.leaves import Leaves
from .next_capture import NextCapture
from .options import Options
from .ranks.connection import Connection
from .ranks.consensus import (
    COMPILE,
    FAILED,
    MeshRanks,
    ProgramsDifferError,
    agree_on_program,
    notifying,
)
from .ranks.failures import StateIs
from .running.compiled import Compiled, Restore
from .running.deferred_program import DeferredProgram
from .running.expert_room import ExpertRoom
from .running.kept_programs import KeptPrograms
from .state.edits import EditedError, compare_edits, number_of
from .unexpected_errors import unexpected_errors
from .unsharded import check_is_sharded
from .watching.watch import Spec


@dataclass
class Turn:
    """One call of a step, as far as it has come: what the other ranks have to know should it fail.

    ``compiled`` is the program that fits the call, and ``live`` what it runs on; both None while there is none.
    ``rows``: of the batch, where ranks brought unequal numbers of them.
    ``connection``: of the ranks that make this call together, None where there is one. ``is_distributing``: live state
    is being made equal and split. ``made``: edits of state since the call before (``state/edits.py``). ``answers``: the
    first values that the step asks for, as the call has shown them. ``watched``: the statistics that it looks at.
    """

    call: Call | None = None
    rows: UnequalRows | None = None
    compiled: Compiled | None = None
    live: Live | None = None
    connection: Connection | None = None
    is_distributing: bool = False
    made: dict[int, int] = field(default_factory=dict)
    answers: Answers = ()
    watched: tuple[Spec, ...] = ()

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
    """The calls of one step: each finds the program that fits it, or what it takes to compile one.

    ``where``: the line of the step, for errors.
    """

    def __init__(self, name: str, function: Callable[..., Any], options: Options, where: str) -> None:
        self.name, self.options, self._where = name, options, where
        self.programs = KeptPrograms(name, options.max_programs)
        self.room = ExpertRoom(options)
        self._function, self._reader = function, ArgumentReader(inspect.signature(function))
        self.captures = NextCapture(name, function, options.dynamic, self._reader, self.programs, self.room)
        self.rows_of_results = RowsOfResults()
        self._known_splits: dict[tuple[tuple[str, int], ...], dict[str, Split]] = {}

    def begin(self, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the program for a call. Raises ``RankMismatchError`` on all ranks unless all choose the same.

        Where ranks have to compile, or differ, they may have brought unequal numbers of rows: then the batch is cut
        anew (``call/unequal_rows.py``). Ranks that would run one program have equal numbers of them.

        A rank that ended the call before, which failed on another, learns of that here; where the other makes this
        call by now, they connect anew, and make it together, or learn why this rank does not.
        """
        try:
            self._begin(turn, args, kwargs)
        except BaseException as error:  # an interrupt, too
            if turn.connection is None or not turn.connection.is_awaited():
                raise
            if not isinstance(error, RankFailedError):
                self._report_failure(error)
                raise
            vars(turn).update(vars(Turn(watched=turn.watched)))
            self._begin(turn, args, kwargs)

    def _begin(self, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._reporting_failure():
            given = self.read(args, kwargs)
            self.fit(turn, given)
            for each in self._pending(turn):
                each.check_pending()
            ranks = None if turn.compiled or turn.call is None else self.ranks_of(turn.call)
        assert turn.call is not None
        if ranks:
            turn.connection = ranks.connect(self.name, *refusal_of(turn.call.given), has_failed(turn.call.given))
        try:
            self._agree(turn)
        except ProgramsDifferError as error:
            if not error.can_compile:
                raise
            finished = self._finish_pending(turn, None)  # also where this rank would have run it within the call
            if not self._cut_rows(turn, given):
                if not finished:
                    raise self._with_shapes(error, turn) from None
                self._fit_again(turn, given)  # ranks may differ in nothing else
        else:
            self._finish_pending(turn, turn.compiled)
            if turn.compiled or not self._cut_rows(turn, given):
                return
        try:
            self._agree(turn)
        except ProgramsDifferError as error:
            raise (self._with_shapes(error, turn) if error.can_compile else error) from None

    def _pending(self, turn: Turn) -> list[DeferredProgram]:
        """The programs that have an update of state of this call pending."""
        assert turn.call is not None, "a call that has begun was read"
        given = turn.call.given
        found = pending.pending_on([*given.modules.values(), *given.optimizers.values()])
        return [each for each in found if isinstance(each, DeferredProgram)]

    def _finish_pending(self, turn: Turn, steady: Compiled | None) -> bool:
        """Finish the updates of state of this call that are pending, but for that of ``steady``; all ranks do.

        Returns whether there were any.
        """
        found = [each for each in self._pending(turn) if each is not steady]
        for each in found:
            if each.connection is turn.connection:
                each.run_pending()
            else:
                each.finish_pending()
        return bool(found)

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
        state = (edits.names, edits.parts, edits.tensors(live.tensors)) if edits and live else ([], [], [])
        with notifying(connection, self.name):
            gather = partial(connection.all_gather_text, what=self.name)
            ranks = connection.members.ranks
            written, unequal = compare_edits(self.name, *state, [*turn.made], ranks, gather)
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
        self._fit_again(turn, given)
        return True

    def _fit_again(self, turn: Turn, given: Arguments) -> None:
        """Find the program anew, for arguments or state that have changed since; then all agree again."""
        if turn.connection is not None:
            turn.connection.is_in_call = False
        with self._reporting_failure():
            self.fit(turn, given)

    def _splits(self, given: Arguments, call: Call) -> dict[str, Split]:
        """The splits of the arguments, found once for arguments of the same names and numbers of dims."""
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
        uneven = turn.rows.uneven if turn.rows else {}
        check_no_sync_is_inside(self.name)
        check_is_sharded(given.modules.values())
        turn.call, turn.compiled, turn.live = self._call(turn, given, uneven), None, None
        for compiled in self.programs.by_last_run:
            admits = compiled.is_of_this_world() and compiled.is_connected() and compiled.uneven == uneven
            admits = admits and not compiled.left and begin_with(compiled.captured.answers, turn.answers)
            admits = admits and compiled.captured.specs == turn.watched
            admitted = compiled.guards.admit(given) if admits else None
            if admitted is not None:
                arguments, turn.live = admitted
                turn.call = self._call(turn, arguments, uneven) if arguments is not given else turn.call
                compiled.executable.commit.start(compiled.connection)
                turn.compiled, turn.connection = compiled, compiled.connection
                return
        arguments = with_found(self._function, given)
        check_is_sharded(arguments.modules.values())
        turn.call = self._call(turn, arguments, uneven)
        turn.call.no_logs = self._reader.no_logs

    def _call(self, turn: Turn, given: Arguments, uneven: Mapping[str, int]) -> Call:
        call = Call(given, self.options.mode, uneven)
        call.answers, call.asks_nothing = turn.answers, self.options.begins_once
        call.watched = turn.watched
        call.likely = self.programs.last.captured.answers if self.programs.last is not None else ()
        return call

    def ranks_of(self, call: Call) -> MeshRanks:
        """The ranks that a call compiles with."""
        return MeshRanks.of(call.device_mesh, self.options.timeout)

    def add(self, compiled: Compiled, change: str, call: Call) -> None:
        """Keep a new program, compiled for a call since ``change``, and its capture, if that serves other sizes."""
        self.programs.add(compiled, change)
        if compiled.any_size is not None:
            self.captures.shared.add(self.programs.compiled, compiled.any_size, compiled.guards, call)

    def outgrow(self, turn: Turn, compiled: Compiled, times: float) -> None:
        """Let a call that has changed nothing run a program with ``times`` the room or more; all ranks call this."""
        self.room.grow(compiled.program, times)
        self.leave(turn, compiled, "a rank's experts had more rows than there was room for")

    def answer(self, turn: Turn, compiled: Compiled, number: int) -> None:
        """Let a call that has changed nothing run a program of another answer to a question; all ranks call this."""
        assert turn.call is not None, "a call that has begun was read"
        compiled.give_back()
        turn.call.remove_made()  # the other program may make none
        turn.answers = with_other(compiled.captured.answers, number)
        self._fit_again(turn, turn.call.given)
        self._agree(turn)

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

    def _describe(self, turn: Turn) -> list[str]:
        """The call in lines, for ranks that differ to find the first difference."""
        assert turn.call is not None
        lines = Leaves.of(turn.call.given).describe()
        lines += [f"{each.name}: {type(each.value).__name__}" for each in turn.call.given.found]
        if turn.compiled is not None:
            assert turn.live is not None, "a program fits a call that was read"
            values = turn.compiled.describe_values(turn.call.given, turn.live)
            return [
                *lines,
                *turn.compiled.describe_pending(turn.live),
                *values,
                f"runs {turn.compiled.program.name}",
                describe_seed(),
            ]
        return [*lines, f"has to compile because of {self.programs.reason_to_compile(turn.call)}"]

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
            self.options.mode.mesh or (self.programs.last.device_mesh if self.programs.last else None),
            self.options.timeout,
        )
        if not isinstance(error, Exception):  # an interrupt
            ranks.report_error(self.name, error)
            return
        message = f"failed: {type(error).__name__}: {error}"
        with suppress(RankMismatchError):
            while not self._has_reported(ranks, message):
                pass  # once more, to ranks that make this call in the next connection

    def _has_reported(self, ranks: MeshRanks, message: str) -> bool:
        connection = ranks.connect(self.name)
        try:
            agree_on_program(connection, self.name, FAILED, lambda: [message], self.options.timeout)
        except RankFailedError:
            return connection is None or not connection.is_awaited()
        return True
