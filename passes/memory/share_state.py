"""Let the ranks of a host read flat state where it lies, instead of a copy of it.

A rank may overwrite what it has published once it knows that all others have read it. All ranks run the same nodes in
the same order, so a rank that publishes an operand has waited for the collectives whose waits stand before it. A rank
that has waited for a collective which starts after the wait for another one of the same group thus knows that all ranks
have passed that wait.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ..analysis.aliases import storages
from ..base import Pass
from ..communication.published import published_copy_of
from ..ir.collectives import group_of, is_shared, operands, waits_of
from ..ir.effects import mutates
from ..ir.program import Program
from .update_in_place import UpdateInPlace


@dataclass(frozen=True)
class ShareState(Pass):
    """A collective through shared memory that reads a copy of flat state reads the state itself, where that is safe.

    It is safe if all ranks have read the state before this rank writes to it, and before the call ends and the state is
    the user's again. The input is marked ``shared`` in any case: the first program of a model, which may only evaluate
    it, decides where state lies for all programs that follow. Copies without readers are erased. Nothing may reorder
    the graph afterwards.
    """

    last: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True
    after: ClassVar[tuple[type[Pass], ...]] = (UpdateInPlace,)

    def rewrite(self, program: Program) -> int:
        """Decide for each collective; returns the number of inputs newly shared and of copies that are not read."""
        order = _Order(program.graph)
        flats = {node: i for node, i in zip(program.placeholders, program.inputs, strict=True) if i.parts}
        shared: set[str] = set()
        edits = 0
        for start in order.starts:
            flat = published_copy_of(operands(start)[0])
            if flat in flats:
                shared.add(flats[flat].name)
                if order.is_read_in_time(start, flat):
                    start.replace_input_with(operands(start)[0], flat)
                    edits += 1
        _erase_copies(program.graph, flats)
        return edits + _share(program, shared)


def _share(program: Program, names: set[str]) -> int:
    """Mark the inputs of these names as shared; returns how many were not."""
    new = sum(each.name in names and not each.shared for each in program.inputs)
    program.inputs = [replace(each, shared=True) if each.name in names else each for each in program.inputs]
    return new


def _erase_copies(graph: fx.Graph, flats: Container[fx.Node]) -> None:
    for node in list(graph.nodes):
        if not node.users and published_copy_of(node) in flats:
            graph.erase_node(node)


class _Order:
    """The positions of the starts and ends of collectives through shared memory, and of writes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.found = storages(graph)
        self.starts = [node for node in graph.nodes if is_shared(node)]
        self._writers = [node for node in graph.nodes if mutates(node)]

    def is_read_in_time(self, start: fx.Node, state: fx.Node) -> bool:
        """Whether all ranks have surely read ``state`` before this rank writes to it, and before the call ends."""
        known = [self._end(other) for other in self.starts if self._is_after(other, start)]  # all have read it then
        writes = [self.position[node] for node in self._writers if self._may_write(node, state)]
        return bool(known) and all(min(known) < write for write in writes)

    def _is_after(self, other: fx.Node, start: fx.Node) -> bool:
        return group_of(other) == group_of(start) and self.position[other] > self._end(start)

    def _end(self, start: fx.Node) -> int:
        return max(self.position[wait] for wait in waits_of(start))

    def _may_write(self, node: fx.Node, state: fx.Node) -> bool:
        """Whether ``node`` may write to ``state`` or to a part of it, which is a piece of memory of its own."""
        return any(self.found[state] & self.found[argument] for argument in node.all_input_nodes)
