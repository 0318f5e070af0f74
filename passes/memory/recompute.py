"""Compute values of forward again in backward, instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..base import Pass
from ..cleanup.merge_equal import MergeEqual
from ..ir.edit import insert_before
from ..ir.meta import Relation
from ..ir.program import Program
from ..ir.roles import Phase
from .recomputable import Recomputable


@dataclass(frozen=True)
class Recompute(Pass):
    """Backward computes the results of ``ops`` of forward again, right before it reads them first.

    ``ops`` are names of nodes; those that the program does not keep for backward, or that cannot run again, are left
    alone. What is repeated is marked (``meta["recompute_of"]``), and no pass merges it back. The bits are the same: an
    op runs again on the same operands, and a random one with the same seed. Stands before the passes that gather
    parameters again (``Reshard``), so that an op that runs again finds those of backward.
    """

    ops: tuple[str, ...] = ()
    after: ClassVar[tuple[type[Pass], ...]] = (MergeEqual,)

    def rewrite(self, program: Program) -> int:
        """Visit what runs later in its order, and compute what each op lacks; returns how many ops run again."""
        found = Recomputable(program)
        wanted, dropped = set(self.ops), set[fx.Node]()
        for op in found.kept:
            if op.name in wanted:
                dropped.add(op)
        again = _Again(found, dropped)
        for node in list(program.graph.nodes):
            if node.op == "call_function" and node.meta.get("phase") in (Phase.BACKWARD, Phase.UPDATE):
                again.provide(node)
        return again.count


class _Again:
    """The nodes that were computed again so far."""

    def __init__(self, found: Recomputable, dropped: set[fx.Node]) -> None:
        self._found, self._dropped = found, dropped
        self._copies: dict[fx.Node, fx.Node] = {}
        self.count = 0

    def provide(self, reader: fx.Node) -> None:
        """Let ``reader`` read what is computed again in place of what is not kept."""
        for node in reader.all_input_nodes:
            if not self._found.exists_later(node, self._dropped):
                reader.replace_input_with(node, self._copy(node, reader))

    def _copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """``node`` computed again before ``reader``, if it has not been before; without recursion: chains are long."""
        pending = [node]
        while pending:
            each = pending[-1]
            lacking = [operand for operand in each.all_input_nodes if self._lacks(operand)]
            if lacking:
                pending += lacking
                continue
            pending.pop()
            if each not in self._copies:
                self._repeat(each, reader)
        return self._copies[node]

    def _lacks(self, node: fx.Node) -> bool:
        return node not in self._copies and not self._found.exists_later(node, self._dropped)

    def _repeat(self, node: fx.Node, reader: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: self._copies.get(each, each))
        like = Relation.REPLACEMENT
        copy = insert_before(reader, node.target, *args, like=node, relation=like, kwargs=kwargs, val=node.meta["val"])
        copy.meta |= {"phase": reader.meta["phase"], "recompute_of": node.name}
        self._copies[node] = copy
        self.count += 1
