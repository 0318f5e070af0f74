"""State that the ranks of a host read where it lies, not a copy of it: decided when places are, since order is final.

A rank may write to what it has posted once it knows that all others have read it. Ranks run the same nodes in the same
order: who has posted a later operand has waited for the earlier ones that stand before it. So whoever has waited for a
collective that started after the wait for another, of the same group, knows that all ranks have passed that wait.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..analysis.aliases import storages
from ..ir.collectives import group_of, is_shared, operands, waits_of
from ..ir.effects import mutates
from ..ir.program import Program

aten = torch.ops.aten


def post_state(program: Program) -> None:
    """Let flat state be posted itself where only its copy was, if nobody writes to it before all ranks have read it.

    Somebody has to have read all before the call ends: then state is the user's again. It is ``shared`` in any case:
    the first program of a model, which may evaluate it, decides where state lies for all that follow.
    """
    order = _Order(program.graph)
    flats = {node: i for node, i in zip(program.placeholders, program.inputs, strict=True) if i.parts}
    shared: set[str] = set()
    for start in order.starts:
        flat = _copied(operands(start)[0])
        if flat in flats:
            shared.add(flats[flat].name)
            if order.is_read_in_time(start, flat):
                start.replace_input_with(operands(start)[0], flat)
    program.inputs = [replace(i, shared=True) if i.name in shared else i for i in program.inputs]
    for node in list(program.graph.nodes):
        if _copied(node) in flats and not node.users:
            program.graph.erase_node(node)


def _copied(node: fx.Node) -> fx.Node | None:
    """What ``node`` posts a copy of, as ``Realise`` writes it: a concatenation of one."""
    members = node.args[0] if node.target is aten.cat.default else ()
    return members[0] if isinstance(members, (list, tuple)) and len(members) == 1 else None  # type: ignore[return-value]


class _Order:
    """Where the collectives of a graph start and end that read memory, and where memory is written to."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.found = storages(graph)
        self.starts = [node for node in graph.nodes if is_shared(node)]
        self._writers = [node for node in graph.nodes if mutates(node)]

    def is_read_in_time(self, start: fx.Node, state: fx.Node) -> bool:
        """Whether this rank knows that all have read ``state``, before it writes to it and before the call ends."""
        known = [self._end(other) for other in self.starts if self._is_after(other, start)]
        writes = [self.position[node] for node in self._writers if self._may_write(node, state)]
        return bool(known) and all(min(known) < write for write in writes)

    def _is_after(self, other: fx.Node, start: fx.Node) -> bool:
        return group_of(other) == group_of(start) and self.position[other] > self._end(start)

    def _end(self, start: fx.Node) -> int:
        return max(self.position[wait] for wait in waits_of(start))

    def _may_write(self, node: fx.Node, state: fx.Node) -> bool:
        """Whether a writer also touches ``state`` or a part of it, which is a piece of memory of its own."""
        return any(self.found[state] & self.found[argument] for argument in node.all_input_nodes)
