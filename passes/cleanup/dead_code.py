"""Remove nodes without readers. FX's own pass would keep every collective, as it counts them as impure."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Pass
from ..ir.effects import is_pure
from ..ir.program import Program


@dataclass(frozen=True)
class DeadCode(Pass):
    """Pure nodes that no output depends on are erased, collectives included: all ranks erase the same.

    Placeholders stay, and so do the views of the parts of flat ones: the inputs of a program do not change. Impure
    nodes stay, with all that they depend on.
    """

    def rewrite(self, program: Program) -> int:
        """Erase from the end, so that a node that only dead nodes read is dead when it is visited."""
        edits, inputs = 0, {node for _, node in program.values().values()}
        for node in reversed(program.graph.nodes):
            if not node.users and node not in inputs and is_pure(node):
                program.graph.erase_node(node)
                edits += 1
        return edits
