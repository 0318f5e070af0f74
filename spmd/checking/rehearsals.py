"""``Rehearsals``: the programs of one step in one mode, made on the first of simulated ranks, and run by none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..capture.sizes.size_symbols import TracedSizes
from ..modes.base import ParallelMode
from ..step import CompiledStep
from ..step_compiler import Rehearsal
from ..verification.copies import Copy, Subject
from ..verification.rank import SimulatedRank


@dataclass(frozen=True)
class Rehearsals:
    """The step ``subject`` in ``mode``, on the ranks of ``mesh``, each with its part of the batch."""

    subject: Subject
    mode: ParallelMode
    mesh: DeviceMesh

    def make(self) -> Rehearsal:
        """The program of the call. Raises what compiling it would raise."""
        return self._rank().rehearse()

    def with_open_sizes(self, sizes: Mapping[str, Mapping[int, str]]) -> Rehearsal:
        """The same, traced for any of these sizes as far as that can be; they have names, by argument and dim."""
        return self._rank(dynamic=sizes).rehearse()

    def traces(self, sizes: TracedSizes) -> bool:
        """Whether the step can be traced for other sizes of the arguments."""
        return self._rank().traces(sizes)

    def _rank(self, **options: Any) -> SimulatedRank:
        """A rank of its own for each program: what an earlier one noted, such as a log, may change the next."""
        subject = self.subject
        step = CompiledStep(subject.function, replace(subject.options, mode=self.mode, **options))
        given = Copy(subject.args, subject.kwargs, self.mode.ignored, in_double=False)  # the user's own
        return SimulatedRank(Subject(step, subject.args, subject.kwargs), given, 0, self.mesh)
