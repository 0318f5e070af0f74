"""Split a program that runs for each micro-batch: the last run updates, the ones before it accumulate alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base import Pass
from ..cleanup.dead_code import DeadCode
from ..communication.gather_once import gather_once
from ..communication.reduce_once import reduce_once
from ..errors import PassError
from ..ir.micro_batches import accumulating, runs_of
from ..ir.program import Program


@dataclass(frozen=True)
class SplitMicroBatches(Pass):
    """A program of its own for all runs of a call but the last one, without what accumulators do not need.

    The passes behind it rewrite both. It stands before updates are written in place. The first run has a program of its
    own, too, where it communicates for all of them (``reduce_once``, and ``gather_once`` if the program asks for it).
    """

    def rewrite(self, program: Program) -> int:
        """Make the program, once."""
        micro = program.micro_batches
        if micro is None:
            return 0
        first = accumulating(micro.accumulating or program, micro.joined)
        _check_inputs(first, program)
        DeadCode().rewrite(first)
        program.micro_batches = replace(micro, accumulating=first)
        if len(runs_of(program)) > 1:
            reduce_once(program)
            if program.gathers_once:
                gather_once(program)
        return 1


def _check_inputs(first: Program, last: Program) -> None:
    """Both find state where the other one does: where programs differ in sizes, passes have formed the same units."""
    one, other = ([(each.name, [part.input.name for part in each.parts]) for each in p.inputs] for p in (first, last))
    if one != other:
        raise PassError(f"{first.name} keeps state otherwise than {last.name} does: pass batches that divide evenly")
