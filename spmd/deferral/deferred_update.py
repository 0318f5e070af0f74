"""Deferred updates: a call leaves its last reductions and its update to the next one.

``DeferredUpdate`` belongs to one compiled program. A call runs ``first``, or ``steady`` where the update of the call
before is pending; ``finish`` runs that update alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from passes import OutputKind, Program, Role
from passes.defer import Deferred

from .._torch import version_of
from ..call.state import Arguments
from ..lowering.arenas import Arenas
from ..lowering.codegen import is_taken
from ..lowering.lower import lower
from ..lowering.regions import CompiledRegions
from ..state.commit import Commit


@dataclass
class PendingUpdate:
    """What a call has left: the ``values`` that the update reads, and the state ``tensors`` and ``owners`` of the call.

    ``versions``: how often each of ``written``, which the update writes to, had been written to when the call ended.
    """

    values: list[Any]
    tensors: list[torch.Tensor]
    owners: list[Any]
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)

    def watch(self, written: dict[str, torch.Tensor]) -> None:
        """Note how these tensors stand."""
        self.written, self.versions = written, _versions(written)

    def changed(self) -> list[str]:
        """The tensors that were written to since then."""
        now = _versions(self.written)
        return [name for name, one, other in zip(self.written, self.versions, now, strict=True) if one != other]


class DeferredUpdate:
    """The three programs, lowered, and what is pending between two calls."""

    def __init__(
        self, programs: Deferred, arenas: Arenas, commit: Commit, regions: CompiledRegions | None = None
    ) -> None:
        self.programs, self._commit = programs, commit
        self.pending: PendingUpdate | None = None
        self.is_lost = False  # whether a call failed that was to run a pending update
        self.last: Program | None = None  # the program that was run last
        by_name = programs.programs().values()
        self._first, self._steady, self._finish = (lower(each, arenas, commit, regions) for each in by_name)
        kinds = [output.kind for output in programs.first.outputs]
        self._results = len([kind for kind in kinds if kind in (OutputKind.RESULT, OutputKind.NEW)])
        inputs = list(zip(programs.finish.placeholders, programs.finish.inputs, strict=True))
        self._taken = [is_taken(node, each) for node, each in inputs if each.role is Role.PENDING]
        declared = [inside for i in programs.finish.inputs for inside in ([p.input for p in i.parts] or [i])]
        self.written = frozenset(each.name for each in declared if each.in_place)

    @property
    def steady(self) -> Program:
        """The program of all calls but the first."""
        return self.programs.steady

    def of_call(self, arguments: Arguments, tensors: list[torch.Tensor]) -> Callable[[Sequence[Any]], list[Any]]:
        """What runs a call on these state tensors: it takes inputs and returns results, as the whole program does."""
        owners = [*arguments.modules.values(), *arguments.optimizers.values()]

        def run(inputs: Sequence[Any]) -> list[Any]:
            numbers = [_own(inputs[k]) for k in self.programs.numbers]
            before, self.pending = self.pending, None
            if before is None:
                self.last, returned = self.programs.first, self._first(inputs)
            else:
                self.last, self.is_lost = self.programs.steady, True  # unless it goes well
                self._commit.skip_barrier()
                returned = self._steady([*inputs, *self._handed_over(before)])
                self.is_lost = False
            self.pending = PendingUpdate([*returned[self._results :], *numbers], tensors, owners)
            return returned[: self._results]

        return run

    def finish(self, inputs: Sequence[Any]) -> None:
        """Run the pending update. ``inputs``: of its call, of which it reads state alone."""
        assert self.pending is not None, "an update is pending"
        before, self.pending = self.pending, None
        self._commit.skip_barrier()
        self._finish([*inputs, *self._handed_over(before)])

    def _handed_over(self, before: PendingUpdate) -> list[Any]:
        """The values as programs take them: tensors in a list each, from which they go once they were read."""
        values, before.values = before.values, []
        return [[value] if is_taken else value for value, is_taken in zip(values, self._taken, strict=True)]

    def close(self) -> None:
        """Drop what is pending, all references to state, and the generated code."""
        self.pending = None
        for each in (self._first, self._steady, self._finish):
            each.close_code()


def _own(number: Any) -> Any:
    """The number as it is now, also where the user keeps it in a tensor."""
    return number.clone() if isinstance(number, torch.Tensor) else number


def _versions(tensors: dict[str, torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors.values()]
