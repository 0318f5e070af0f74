"""Run a compiled program: live state and arguments in, results out, new state where it belongs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes import Pass, PassError, Program, RankMismatchError, Report
from passes.runtime.answers import OtherAnswerError
from passes.runtime.rooms import RoomExceededError

from ..call.state import Arguments
from ..capture import Captured
from ..capture.sizes.any_size import AnySize
from ..guards.guards import Guards, Live
from ..interpreter.interrupts import hold_signals
from ..lowering.first_call import first_difference
from ..lowering.lower import Executable
from ..ranks.connection import Connection
from ..state.edits import Edits
from ..state.freed_pages import return_freed_pages
from ..watching.watch import Watched
from .equal_inputs import EqualInputs, intent_of
from .inputs import Inputs, Running
from .results import Results

Restore = Callable[[list[Any]], list[Any]]  # from what a program returns to what users see
Execute = Callable[[Sequence[Any]], list[Any]]  # from a program's inputs to what it returns


@dataclass(kw_only=True)
class Compiled:
    """One program with everything it takes to run it."""

    program: Program
    captured: Captured
    partitioned: Program
    pipeline: tuple[Pass, ...]  # what was run on it
    executable: Executable
    device_mesh: DeviceMesh
    make_report: Callable[[], Report]
    added: dict[str, torch.Tensor]  # state that a transform added, and master copies, by input name
    identity: int  # equal on all ranks that run the same program
    uneven: dict[str, int]  # see ``Call``
    connection: Connection | None  # of the ranks that run it together
    writes: bool  # whether a call puts something somewhere, on any of these: all of them end it together then
    guards: Guards
    copied: dict[str, str]  # see ``copied_state``
    any_size: AnySize | None = None  # the trace that it was made from, if that serves other sizes of its arguments, too
    left: str = ""  # the reason that no later call runs it, on any rank
    watched: dict[Watched, torch.Tensor] = field(init=False, default_factory=dict)  # statistics of the last call
    edits: Edits = field(init=False)
    inputs: Inputs = field(init=False)
    _results: Results = field(init=False)
    _equal: EqualInputs = field(init=False)
    _world: weakref.ref[Any] = field(init=False)  # the process group of all ranks, when it was compiled
    _is_new: bool = field(init=False, default=True)  # until its first call

    def __post_init__(self) -> None:
        names = self.guards.layout.names
        self.edits = Edits(names, self.copied)
        self.inputs = Inputs(self.program, self.captured, self.guards, self.added)
        memory = self.executable.function.arenas.gradients
        self._results = Results(self.program, self.captured, names, self.device_mesh, memory)
        self._equal = EqualInputs(self.captured, self.guards, self.inputs.draws, self.connection is not None)
        self._world = weakref.ref(dist.group.WORLD)
        self.guards.on_release = self._release

    @cached_property
    def report(self) -> Report:
        """Made when it is first asked for: the simulation of a step takes a twentieth of a compile."""
        return self.make_report()

    def describe_pending(self, live: Live) -> list[str]:
        """A line for what a call with this state finishes of the one before, if there is anything."""
        return []

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that run."""
        return (self.program,)

    @property
    def graphs(self) -> tuple[Program, ...]:
        """The programs that it keeps in memory: as captured, partitioned and run."""
        return self.captured.program, self.partitioned, self.program

    @property
    def last_program(self) -> Program:
        """The program last run."""
        return self.program

    def give_back(self) -> None:
        """End a call before it has changed anything, on all ranks: another program runs it."""
        self.inputs.leave()
        self.executable.commit.wait_for_ranks()  # the next program computes where peers may still read

    def abandon(self, why: str) -> None:
        """The same, and run no other call."""
        self.give_back()
        self.left = why

    def _release(self) -> None:
        """Hold on to nothing: the model is gone, so the program never runs again."""
        self.edits.close()
        self.captured.release()
        self.executable.close()
        self.inputs.release()
        self.added.clear()

    def drop(self) -> None:
        """Let go of state and code: no later call runs the program, though its model may be trained by others."""
        self.captured.release()
        self.executable.close_code()
        self.inputs.release()
        self.added.clear()

    @property
    def is_of_first_rank(self) -> bool:
        """Whether this is the first rank of the mesh."""
        return not any(axis.coordinate for axis in self.program.mesh.axes)

    @property
    def is_of_one_size(self) -> bool:
        """Whether it was made from a trace that serves other sizes of its arguments, too."""
        return self.captured.is_of_one_size

    def is_of_this_world(self) -> bool:
        """Whether the process group is still the one that the program was compiled for: another may be larger."""
        return dist.is_initialized() and self._world() is dist.group.WORLD

    def is_alive(self) -> bool:
        """Whether a later call may run the program."""
        return not (self.guards.dead or self.left) and self.is_of_this_world() and self.is_connected()

    def is_connected(self) -> bool:
        """Whether the ranks that it communicates with are still connected: a call may have failed."""
        return self.connection is None or self.connection.is_open

    def intent(self, arguments: Arguments, live: Live, edits: int) -> int:
        """The number that ranks compare before a call: of program, numbers, ``edits``, and the seed where it draws."""
        return intent_of(self._equal.identity(self.identity, arguments, live) ^ edits)

    def describe_values(self, arguments: Arguments, live: Live) -> list[str]:
        """A line for each number and tensor of a call that must be equal on all ranks."""
        return self._equal.describe(arguments, live)

    def run(
        self, arguments: Arguments, live: Live, restore: Restore | None = None, execute: Execute | None = None
    ) -> Any:
        """One call: gather the inputs, run, put results and new state where they belong.

        ``live`` is as ``guards`` found it; ``restore`` makes the results that the caller expects. ``execute`` runs the
        program in place of its executable.
        """
        if restore is not None and self.inputs.written:
            raise RankMismatchError(
                f"ranks brought unequal numbers of rows of {self.inputs.names[self.inputs.written[0]]}, which the step "
                "writes into: pass equal numbers of rows, or return the new rows instead of writing them"
            )
        return self._execute(self.start(arguments, live), live, restore, execute or self.executable)

    def _execute(self, running: Running, live: Live, restore: Restore | None, execute: Execute) -> Any:
        return self.finish(running, execute(running.inputs), restore)

    def check_first_call(self, arguments: Arguments, name: str) -> None:
        """Raise on all ranks if the program computes something else on any than before its passes ran."""
        live = self.guards.live(arguments)
        assert live is not None, "a program fits the call that it was compiled for"
        found = ""
        with suppress(RoomExceededError, OtherAnswerError):  # it is run again, by a program that is checked then
            found = first_difference(
                self.partitioned, self.program, self.executable, self.inputs.by_name(arguments, live)
            )
            self.executable.commit.check_fit()
        sentence = f"{name} computes something else than before its passes ran: {found}" if found else ""
        gathered = [sentence]
        if self.connection is not None:
            gathered = self.connection.all_gather_text(sentence, f"the check of {name}")
        wrong = next(filter(None, gathered), "")
        if not wrong:
            return
        self.drop()
        if self.connection is not None:
            self.connection.is_in_call = False  # all ranks know, and none has changed anything
        advice = "spmd.verify(step, ...) names the pass, and passes=() runs none. State is as it was before the call"
        raise (PassError if sentence else RankMismatchError)(f"{sentence or wrong}. {advice}")

    def start(self, arguments: Arguments, live: Live) -> Running:
        """Gather the inputs of a call; ``run`` has the rest."""
        running = self.inputs.enter(arguments, live)
        self.executable.commit.clear_gradients(self.inputs.cleared(live.tensors))
        if self._is_new:
            self._is_new = False
            return_freed_pages()  # state lies where it stays, and the memory that the program runs in is not there yet
        return running

    def finish(self, running: Running, returned: list[Any], restore: Restore | None = None) -> Any:
        """Put what the executable ``returned`` where it belongs, and return what the step does."""
        arguments, tensors = running.arguments, running.tensors
        commit = self.executable.commit
        commit.check_fit()
        hold_signals()  # all messages of the program have left: other ranks may end the call
        shown = returned if restore is None else restore(returned)
        if self.inputs.clears or self.inputs.written or self.writes:
            commit()  # all below is written on all ranks, or on none
        self.inputs.leave()
        for k in self.inputs.written:
            if running.contiguous[k] is not running.given[k]:
                running.given[k].copy_(running.contiguous[k])
        self.watched = {key: returned[each.index] for key, each in self.captured.watched.items()}
        self._results.write_state(returned, arguments, tensors)
        self._results.write_python_state(returned, shown, arguments, tensors)
        commit.finish()
        self._note_end(tensors)
        return self.captured.result(shown)

    def _note_end(self, tensors: list[torch.Tensor]) -> None:
        """Note how the state of a call stands at its end, to find what is written to it between calls."""
        if self.connection is not None:
            self.edits.end_call(tensors)
