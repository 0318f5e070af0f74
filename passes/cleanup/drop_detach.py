"""Remove ``aten.detach`` and ``aten.alias``: after tracing there is no autograd left for them to stop."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Pass
from ..ir.edit import stand_in
from ..ir.ops import Trait, has
from ..ir.program import Program


@dataclass(frozen=True)
class DropDetach(Pass):
    """Each detach or alias is replaced by its input. Values, memory and order stay the same."""

    def rewrite(self, program: Program) -> int:
        """Replace and erase each."""
        found = [node for node in program.graph.nodes if has(node.target, Trait.RETURNS_OPERAND)]
        for node in found:
            stand_in(node, node.args[0])
            program.graph.erase_node(node)
        return len(found)
