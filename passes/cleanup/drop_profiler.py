"""Remove profiler ranges: tracing records those that ``Optimizer.step`` opens, around nodes that passes then move."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Pass
from ..ir.effects import is_profiling
from ..ir.program import Program


@dataclass(frozen=True)
class DropProfiler(Pass):
    """Each node that opens or closes a profiler range is erased. Values and their order stay the same."""

    def rewrite(self, program: Program) -> int:
        """Erase from the end: the node that closes a range reads the one that opens it."""
        ranges = [node for node in program.graph.nodes if is_profiling(node)]
        for node in reversed(ranges):
            program.graph.erase_node(node)
        return len(ranges)
