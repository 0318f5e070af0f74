"""Split a program that runs for each micro-batch: the last run updates, the ones before it accumulate alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base import Pass
from ..cleanup.dead_code import DeadCode
from ..ir.micro_batches import accumulating
from ..ir.program import Program


@dataclass(frozen=True)
class SplitMicroBatches(Pass):
    """A program of its own for all runs of a call but the last one, without what accumulators do not need.

    The passes behind it rewrite both. It stands before updates are written in place.
    """

    def rewrite(self, program: Program) -> int:
        """Make the program, once."""
        micro = program.micro_batches
        if micro is None or micro.accumulating is not None:
            return 0
        first = accumulating(program)
        DeadCode().rewrite(first)
        program.micro_batches = replace(micro, accumulating=first)
        return 1
