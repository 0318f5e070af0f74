"""Run a compiled program whose update is left to the next call (``defer_updates``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from passes import Program, SpmdError

from ..call.state import Arguments
from ..deferral import pending
from ..deferral.deferred_update import DeferredUpdate
from ..guards.guards import Live
from ..ranks.consensus import agree_on_program, identity_of, notify
from .compiled import Compiled, Execute, Restore
from .equal_inputs import intent_of
from .inputs import Running

_IS_PENDING, _IS_REPLACED = 1 << 59, 1 << 58


@dataclass(kw_only=True)
class DeferredProgram(Compiled):
    """The programs of ``deferred`` run in place of the whole one, which shares its work between calls with them."""

    deferred: DeferredUpdate

    @property
    def has_pending(self) -> bool:
        """Whether the update of its last call is left to do."""
        return self.deferred.pending is not None

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that run in place of the whole one."""
        return tuple(self.deferred.bundle.programs.values())

    @property
    def graphs(self) -> tuple[Program, ...]:
        """The programs that it keeps in memory: as captured, partitioned, whole and run."""
        return *super().graphs, *self.programs

    @property
    def last_program(self) -> Program:
        """The program last run; the whole one before the first call."""
        return self.program if self.deferred.last is None else self.deferred.last

    def owners(self) -> list[Any]:
        """The modules and optimizers of the call whose update is pending."""
        return self.deferred.pending.owners if self.deferred.pending is not None else []

    def drop(self) -> None:
        """Let go of state and code: no later call runs the program, though its model may be trained by others."""
        self._drop_pending()
        super().drop()

    def _release(self) -> None:
        self._drop_pending()
        super()._release()

    def _drop_pending(self) -> None:
        self.deferred.close()
        pending.remove(self)

    def intent(self, arguments: Arguments, live: Live, edits: int) -> int:
        """The number that ranks compare before a call; an update that is pending is part of it, and when it is done."""
        pending = _IS_PENDING if self.has_pending else 0
        return super().intent(arguments, live, edits ^ pending ^ (_IS_REPLACED if self._replaced(live) else 0))

    def describe_pending(self, live: Live) -> list[str]:
        """A line for the update that a call with this state finishes, if one is pending."""
        replaced = self._replaced(live)
        before = f", for {self.guards.layout.names[replaced[0]]} has been replaced since" if replaced else ""
        return [f"finishes the update of the call before{before}"] if self.has_pending else []

    def _replaced(self, live: Live) -> list[int]:
        return self.deferred.pending.replaced(live.tensors) if self.deferred.pending is not None else []

    def run(
        self, arguments: Arguments, live: Live, restore: Restore | None = None, execute: Execute | None = None
    ) -> Any:
        """One call. What is pending is of the state of the call before: it is done first where other state came in."""
        if self._replaced(live):
            self.run_pending()
            self.executable.commit.start(self.connection)
        return super().run(arguments, live, restore, execute)

    def _execute(self, running: Running, live: Live, restore: Restore | None, execute: Execute) -> Any:
        """Run one call, which leaves its update pending. If it fails, what was pending is lost, or done in part."""
        execute = self.deferred.of_call(running.arguments, running.tensors)
        try:
            result = super()._execute(running, live, restore, execute)
        except BaseException:
            self.deferred.is_lost = self.deferred.pending is not None or self.deferred.is_lost
            self.deferred.lose()
            pending.remove(self)
            raise
        if self.deferred.pending is not None:
            self.deferred.pending.watch(self._written_later(live))
            pending.add(self)
        return result

    def _note_end(self, tensors: list[torch.Tensor]) -> None:
        if self.connection is not None:
            self.edits.note(tensors)

    def _written_later(self, live: Live) -> dict[str, torch.Tensor]:
        """This rank's state that the pending update writes to, by name."""
        state = zip(self.guards.layout.names, self.guards.layout.locals(live.tensors), strict=True)
        return {name: tensor for name, tensor in state if name in self.deferred.written}

    def check_pending(self) -> None:
        """Raise ``SpmdError`` if state was written to since the call whose update is pending."""
        changed = self.deferred.pending.changed() if self.deferred.pending else []
        if changed:
            raise SpmdError(
                f"{changed[0]} was written to while an update of it was pending, which came first in your code: call "
                "flush() of the step, on all ranks, before you write to parameters or optimizer state; now it updates "
                "what you have written"
            )

    def finish_pending(self, is_asked: bool = False) -> None:
        """Run the update that the last call has left; all its ranks come together to do so.

        ``is_asked``: the user knows that it is pending, and may have written to what it writes to.
        """
        with pending.calling:
            if not self.has_pending:
                return
            what = f"the pending update of {self.program.name}"
            if not self.is_of_this_world() or not self.is_connected():
                self.lose_pending()
                raise SpmdError(
                    f"{what} is lost, since the process group or a call after it has ended: state is as before that "
                    "update. Call flush() of the step before the process group is destroyed"
                )
            if not is_asked:
                self.check_pending()
            intent = intent_of(identity_of(f"finish {self.identity}", ""))
            agree_on_program(self.connection, what, intent, lambda: [f"finishes {what}"], None)
            self.run_pending()
            if self.connection is not None:
                self.connection.is_in_call = False

    def run_pending(self) -> None:
        """Run the update that the last call has left; all its ranks have come to do so."""
        assert self.deferred.pending is not None, "an update is pending"
        commit, tensors, memory = self.executable.commit, self.deferred.pending.tensors, self.deferred.pending.memory
        commit.start(self.connection)
        try:
            self.deferred.finish(self.inputs.of_state(memory))
            self.inputs.leave()
            commit.finish()
            self.edits.note(tensors)
        except BaseException as error:
            notify(self.connection, f"the pending update of {self.program.name}", error, commit.state)
            raise
        finally:
            pending.remove(self)

    def lose_pending(self) -> str:
        """Drop what is pending, if its connection is closed; returns a sentence, empty if nothing was."""
        if self.is_connected() or not (self.has_pending or self.deferred.is_lost):
            return ""
        self.deferred.lose()
        self.deferred.is_lost = False
        pending.remove(self)
        return f"the update that the call before had left pending ({self.program.name}) is lost, or done in part only"
