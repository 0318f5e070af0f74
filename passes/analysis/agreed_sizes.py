"""The bytes that a collective moves, as all ranks know it: the size by which passes decide.

Ranks must take the same decisions. The ranks of one group have operands of one size, since uneven shards are padded
before they are sent; but on a mesh of several axes the next group may have shorter ones, where another axis splits a
dim unevenly. The partitioner notes the bytes on the rank that moves the most (``meta["most_bytes"]``).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ..ir.collectives import input_bytes, output_bytes
from ..ir.program import Program, is_even, is_sharded


def most_bytes(node: fx.Node) -> int:
    """Bytes of the larger of a collective's operand and result, on the rank that has the most: equal on all ranks.

    Without that key, all ranks have as many as this one.
    """
    most: int | None = node.meta.get("most_bytes")
    return max(input_bytes(node), output_bytes(node)) if most is None else most


def of_all(nodes: Iterable[fx.Node]) -> dict[str, int]:
    """The entry for the ``meta`` of the one collective that replaces several; empty if one of them has none."""
    nodes = list(nodes)
    known = all("most_bytes" in node.meta for node in nodes)
    return {"most_bytes": sum(node.meta["most_bytes"] for node in nodes)} if known else {}


def has_unequal_parts(program: Program) -> bool:
    """Whether ranks hold unequal parts of some value: its size is not the same on all, nor what is estimated of it."""
    inputs = [each for declared in program.inputs for each in declared.inside]
    even = all(is_even(each.shape, each.placement, program.mesh) for each in inputs if is_sharded(each.placement))
    return not even or any(node.meta.get("uneven") for node in program.graph.nodes)
