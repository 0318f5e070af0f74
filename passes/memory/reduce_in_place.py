"""Reduce large gradients where they lie, instead of into memory of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes
from ..analysis.aliases import escaping, last_reads, of_each_result, storages
from ..base import Numerics, Pass
from ..communication.published import reduce_in_place
from ..communication.realise import Realise
from ..ir.collectives import Kind, is_shared, kind_of, operands
from ..ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class ReduceInPlace(Pass):
    """An all_reduce of ``min_bytes`` or more among the ranks of one host overwrites its operand.

    Each rank reduces one part, in place, and copies the others from the ranks that reduced these; the memory plan lets
    the result lie where the operand was. So a gradient takes its memory once and not twice, and fewer bytes are moved.
    Smaller ones stay as they are. Neither the operand nor a member of it may have a reader after the start, so nothing
    may reorder the graph afterwards; and the result has to die within the call.
    """

    min_bytes: int = 1 << 20
    numerics: ClassVar[Numerics] = "reassociates"
    after: ClassVar[tuple[type[Pass], ...]] = (Realise,)
    last: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True

    def rewrite(self, program: Program) -> int:
        """Mark what is reduced in place."""
        readers = _Readers(program)
        found = [node for node in program.collectives() if self._is_large(node) and readers.allow(node)]
        for node in found:
            reduce_in_place(node)
        return len(found)

    def _is_large(self, node: fx.Node) -> bool:
        return is_shared(node) and kind_of(node) is Kind.ALL_REDUCE and most_bytes(node) >= self.min_bytes


class _Readers:
    """The last readers of each piece of memory of a graph."""

    def __init__(self, program: Program) -> None:
        graph = program.graph
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.found = storages(graph, of_each_result(graph))
        self.last, self.escaping = last_reads(graph, self.found), escaping(graph, self.found, program.living_on())

    def allow(self, start: fx.Node) -> bool:
        """Whether the operand of ``start`` is a copy that nothing else reads, and its members are dead by then."""
        (operand,), scratch = operands(start), start.args[1]
        if operand.target is not aten.cat.default or not operand.users.keys() <= {start, scratch}:
            return False
        if self.found[start] & self.escaping:
            return False
        members = [piece for member in operand.all_input_nodes for piece in self.found[member]]
        return all(self.last.get(piece, 0) < self.position[start] for piece in members)
