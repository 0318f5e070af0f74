"""Calls of a step that failed: who may save its state, and how all ranks come to the same state again."""

from __future__ import annotations

from passes import RankFailedError

from .call.call import Call
from .call.refuse_saves import RefusedSaves, refusal_of
from .dispatch import Turn
from .options import Options
from .ranks.consensus import MeshRanks, standing_of
from .ranks.failures import StateIs
from .ranks.standing import StateError
from .state.background_reads import READS
from .state.edits import EditedError
from .state.recover import recover


class FailedCalls:
    """The call of a step that failed last, until one goes well or ``recover`` ends it."""

    def __init__(self, name: str, options: Options) -> None:
        self._name, self._options = name, options
        self._last: Call | None = None
        self._is_edited = False  # since its ranks had written other values to its state
        self._refused: RefusedSaves | None = None

    def note(self, turn: Turn, error: BaseException) -> None:
        """Note that a call raised."""
        if turn.connection is not None or isinstance(error, RankFailedError) or standing_of(None).partly:
            self._last, self._is_edited = turn.call or self._last, isinstance(error, EditedError)

    def end(self) -> None:
        """Note that a call went well."""
        self._last = None
        if self._refused is not None and not self._refused.why:
            self._allow_saves()

    def recover(self) -> None:
        """See ``CompiledStep.recover``."""
        if self._last is not None:
            READS.wait_for_all()
            ranks = MeshRanks.of(self._last.device_mesh, self._options.timeout)
            recover(self._last, ranks, self._name, self._is_edited)
        self._allow_saves()
        self._last = None

    def refuse_saves(self, turn: Turn, error: BaseException) -> None:
        """Let state dicts raise while state is not whole, or not that of the other ranks."""
        if turn.call is None:
            return
        if isinstance(error, StateError) and refusal_of(turn.call.given)[0] is not None:
            return  # the refusal knows more
        standing, why, partly = standing_of(turn.connection), "", ""
        if isinstance(error, StateError):
            standing, why = error.standing, str(error)
        elif turn.state is StateIs.MIXED:
            why = partly = standing.take(has_updated=not turn.is_distributing)
        has_failed = turn.connection is not None and turn.connection.is_closed
        if not (why or (has_failed and self._refused is None)):
            return
        self._allow_saves()
        self._refused = RefusedSaves(turn.call.given, why, standing, partly)

    def _allow_saves(self) -> None:
        if self._refused is not None:
            self._refused.allow()
            self._refused = None
