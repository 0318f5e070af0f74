"""``StepRunner``: a call of a train step, from its arguments to the end of the program that runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from passes import Pass, Program, RankFailedError
from passes.runtime.answers import OtherAnswerError
from passes.runtime.rooms import RoomExceededError

from ._torch import DisableTorchFunctionSubclass
from .answers.answer import Answers, begin_with
from .cache.compile_cache import Lookup
from .call.rng import kept_where
from .call.state import Arguments
from .call.unequal_rows import UnequalRows
from .capture.sizes.size_symbols import TracedSizes
from .capture_call import capture_call
from .deferral.pending import calling, no_hooks_on_calls
from .dispatch import Dispatch, Turn
from .failed_calls import FailedCalls
from .interpreter.interrupts import answering_after
from .modes.adapt import Adapting
from .modes.auto import Auto
from .options import Options
from .profile import Profile
from .ranks.consensus import all_or_none, notify
from .ranks.failures import StateIs
from .recorder import Recorder
from .running.compiled import Compiled
from .step_compiler import Rehearsal, StepCompiler
from .unexpected_errors import unexpected_errors
from .watching.not_finite import NotFinite
from .watching.watch import Watches


class StepRunner:
    """Runs the calls of one step, and prepares those of simulated ranks.

    Each call finds its program or has it compiled, is measured and recorded if the user asks for it, and is reported
    to the other ranks if it fails.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: Options,
        where: str,
        dispatch: Dispatch,
        compiler: StepCompiler,
    ) -> None:
        self._name, self._function, self._options, self._where = name, function, options, where
        self._dispatch, self._compiler = dispatch, compiler
        self.failed = FailedCalls(name, options)
        self.profile, self._calls = Profile(), 0
        mode = options.mode
        self.adapting = Adapting(mode.table, options.pipeline) if isinstance(mode, Auto) and mode.adapt else None
        self.recorder: Recorder | None = None
        self.watches = Watches()
        self._not_finite = NotFinite(name, self.watches, mode.defer_updates) if options.check_nan else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call; returns what the step returns. An error is reported to the other ranks."""
        with answering_after():
            result = self._run_or_report(args, kwargs)
        if self._not_finite is not None:
            self._not_finite.check(self._calls, f"{self.recorder.folder.parent}" if self.recorder else "")
        return result

    def _run_or_report(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        turn = Turn(watched=self.watches.due(self._calls + 1))
        try:
            return self._run(turn, args, kwargs)
        except BaseException as error:  # an interrupt, too
            if self.adapting is not None:
                self.adapting.restart()  # ranks that had ended the call raise in the next one, before it has begun
            self.failed.note(turn, error)
            try:
                if turn.has_begun:
                    notify(turn.connection, self._name, error, turn.state)
            finally:
                self.failed.refuse_saves(turn, error)
            raise

    def _run(self, turn: Turn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with DisableTorchFunctionSubclass():  # what guards look at is not a read
            self._dispatch.begin(turn, args, kwargs)
        assert turn.call is not None, "a call that has begun was read"
        compiled = self._ready(turn)
        if self.adapting is not None and self.adapting.is_due(compiled.identity):
            compiled = self._adapt(turn, compiled, self.adapting)
        while True:
            try:
                return self._run_compiled(turn, compiled)
            except RoomExceededError as error:
                outgrown, self._calls = compiled, self._calls - 1
                self.outgrow(turn, error.times)
                compiled = self._ready(turn)
                outgrown.drop()
            except OtherAnswerError as error:
                self._calls -= 1
                self.answer(turn, error.number)
                compiled = self._ready(turn)

    def _run_compiled(self, turn: Turn, compiled: Compiled) -> Any:
        assert turn.call is not None and turn.live is not None, "a program fits the call that it was compiled for"
        draws = kept_where(lambda: turn.state is StateIs.BEFORE) if compiled.inputs.draws else nullcontext()
        with unexpected_errors("running", compiled.program.name, self._where), draws:
            self._begin_timing(compiled)
            execute, state = self.profile.begin(compiled), turn.live.tensors
            self._calls += 1
            if self.recorder is not None:
                execute = self.recorder.begin(compiled, state, self._calls, execute)
            restore = self._dispatch.restore(turn)
            result = compiled.run(turn.call.given, turn.live, restore, execute)
        self.watches.take(self._calls, compiled.watched, is_first=compiled.is_of_first_rank)
        if self.recorder is not None:
            self.recorder.end(state)
        self.profile.end(compiled)
        if self.adapting is not None:
            self.adapting.end()
        if turn.connection is not None:
            turn.connection.is_in_call = False
        self.failed.end()
        return result

    def _begin_timing(self, compiled: Compiled) -> None:
        if self.adapting is None:
            return
        calls = self.adapting.begin(compiled.identity, compiled.device_mesh.device_type)
        if calls and self.profile.is_over:
            self.profile = Profile(calls, compiled.identity)

    def _adapt(self, turn: Turn, compiled: Compiled, adapting: Adapting) -> Compiled:
        """Decide, with all ranks, whether another schedule takes over; returns the program to run."""
        connection = turn.connection
        gather = partial(connection.all_gather_text, what=self._name) if connection is not None else lambda text: [text]
        pipeline = adapting.decide(compiled.partitioned, compiled.program, compiled.report.measured, gather)
        if pipeline is not None:
            compiled = self._exchange(turn, compiled, pipeline, adapting)
        compiled.program.notes.append(adapting.note)
        if adapting.is_done and compiled.is_of_first_rank:
            adapting.say()
        return compiled

    def _exchange(self, turn: Turn, compiled: Compiled, pipeline: tuple[Pass, ...], adapting: Adapting) -> Compiled:
        """The program with the other schedule; the one that runs, where some rank cannot compile that."""
        assert turn.call is not None, "a call that has begun was read"
        self._dispatch.leave(turn, compiled, "calls were measured, and take another schedule")
        try:
            with self._compiler.running(pipeline):
                adapted = self._ready(turn)
        except RankFailedError:  # not of the schedule: a rank is gone, or was interrupted
            raise
        except Exception as error:
            if turn.is_distributing:
                raise
            adapting.give_up(error)
            compiled.left = ""
            self._dispatch.fit(turn, turn.call.given)
            if turn.connection is not None:
                turn.connection.is_in_call = True  # which ended where the ranks learned of the error
            return compiled
        compiled.drop()
        adapting.adopt(adapted.identity)
        return adapted

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call, by name. Raises ``TypeError`` as the function itself would."""
        return self._dispatch.read(args, kwargs)

    def prepare(self, given: Arguments, rows: UnequalRows | None = None, answers: Answers = ()) -> Turn:
        """All of a call but to run its program, on a simulated rank, which has no others to agree with.

        ``given``: this rank's part of the batch; ``rows``: where the ranks have unequal parts. ``answers``: that the
        call is known to give to what the step asks of values.
        """
        turn = Turn(rows=rows, answers=answers, watched=self.watches.specs())
        self._dispatch.fit(turn, given)
        self._ready(turn)
        return turn

    def outgrow(self, turn: Turn, times: float) -> None:
        """Let a call that had ``times`` the rows of experts that there is room for run a program with more."""
        assert turn.compiled is not None, "it has run a program"
        self._dispatch.outgrow(turn, turn.compiled, times)

    def answer(self, turn: Turn, number: int) -> None:
        """Let a call run a program of another answer to the question of this ``number`` than that of the last one."""
        assert turn.compiled is not None, "it has run a program"
        self._dispatch.answer(turn, turn.compiled, number)

    def capture(self, given: Arguments) -> Program:
        """The captured program of a call, on global shapes, on a simulated rank; nothing is compiled or changed."""
        turn = Turn()
        self._dispatch.fit(turn, given)
        assert turn.call is not None
        options, captures = self._options, self._dispatch.captures
        begun = turn.call.initial_state(captures.idle)
        with no_hooks_on_calls(), begun, all_or_none(self._name, turn.connection) as agreement:
            shared, live = captures.find(turn.call, agreement.all_gather_text)
            lookup = Lookup(turn.call, self._function, live)
            found = capture_call(self._function, turn.call, self._name, options, captures, agreement, shared, lookup)
        return found.captured.program

    def rehearse(self, given: Arguments, rows: UnequalRows | None = None) -> Rehearsal:
        """The program that a call would compile, on a simulated rank; nothing is run, kept or changed."""
        turn = Turn(rows=rows)
        self._dispatch.fit(turn, given)
        assert turn.call is not None
        with calling:
            return self._compiler.rehearse(turn.call)

    def traces(self, given: Arguments, sizes: TracedSizes) -> bool:
        """Whether a call can be traced for other sizes of its arguments, on a simulated rank; nothing is changed."""
        turn = Turn()
        self._dispatch.fit(turn, given)
        assert turn.call is not None
        with calling:
            return self._compiler.traces(turn.call, sizes)

    def _ready(self, turn: Turn) -> Compiled:
        """The program that a call runs, compiled where none fits; ``turn.live`` is what it runs on."""
        assert turn.call is not None
        if turn.compiled is None:
            compiled = self._compiler.compile(turn, turn.call, self._calls + 1)
            assert begin_with(compiled.captured.answers, turn.answers), "a program is of the answers of its call"
            turn.live = compiled.guards.live(turn.call.given)
            turn.compiled = compiled
            compiled.executable.commit.start(turn.connection)
        self._dispatch.programs.use(turn.compiled)
        return turn.compiled
