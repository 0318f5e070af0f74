"""Remove what nobody reads. FX's own would keep every collective, as it counts them as impure."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Pass
from ..ir.effects import is_pure
from ..ir.program import Program


@dataclass(frozen=True)
class DeadCode(Pass):
    """Pure nodes that no output needs are erased, collectives included. All ranks erase the same, as the graph tells.

    Placeholders stay, and what shows the parts of flat ones: the inputs of a program do not change. Impure nodes stay,
    with what they need.
    """

    def rewrite(self, program: Program) -> int:
        """Erase from the end, so that what only dead nodes read is dead when its turn comes."""
        edits, inputs = 0, {node for _, node in program.values().values()}
        for node in reversed(program.graph.nodes):
            if not node.users and node not in inputs and is_pure(node):
                program.graph.erase_node(node)
                edits += 1
        return edits
