"""Compute values of forward again in backward, or have them back from host memory, instead of keeping them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, fx

from ..base import Pass
from ..cleanup.merge_equal import MergeEqual
from ..ir.edit import insert_before
from ..ir.meta import Relation
from ..ir.program import Program
from ..ir.roles import Phase
from ..runtime.host_memory import to_device, to_host
from .recomputable import Recomputable


@dataclass(frozen=True)
class Recompute(Pass):
    """Backward computes the results of ``ops`` of forward again, right before it reads them first.

    Those of ``offloaded`` wait in pinned host memory instead: they are copied there once they are there, and back when
    backward reads the one that it reads before. ``ops`` and ``offloaded`` are names of nodes; those that the program
    does not keep for backward, or that cannot run again, are left alone. What is repeated is marked
    (``meta["recompute_of"]``), and no pass merges it back. The bits are the same: an op runs again on the same
    operands, and a random one with the same seed. Stands before the passes that gather parameters again (``Reshard``),
    so that an op that runs again finds those of backward.
    """

    ops: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    after: ClassVar[tuple[type[Pass], ...]] = (MergeEqual,)

    def rewrite(self, program: Program) -> int:
        """Visit what runs later in its order, and provide what it lacks; returns how many ops run or come back."""
        found = Recomputable(program)
        wanted, moved = set(self.ops), set(self.offloaded)
        offloaded = {op: _to_host(op) for op in found.kept if op.name in moved and isinstance(op.meta["val"], Tensor)}
        dropped = {op for op in found.kept if op.name in wanted} | offloaded.keys()
        again = _Again(found, dropped, offloaded)
        for node in list(program.graph.nodes):
            if node.op == "call_function" and node.meta.get("phase") in (Phase.BACKWARD, Phase.UPDATE):
                again.provide(node)
        again.copy_back_early()
        return again.count


def _to_host(op: fx.Node) -> fx.Node:
    """A copy of a result in host memory, on its way as soon as there is something to copy."""
    return insert_before(op.next, to_host, op, True, like=op, relation=Relation.REPLACEMENT)


class _Again:
    """The nodes that were computed again so far, or copied back; ``offloaded``: copies in host memory, by op."""

    def __init__(self, found: Recomputable, dropped: set[fx.Node], offloaded: dict[fx.Node, fx.Node]) -> None:
        self._found, self._dropped, self._offloaded = found, dropped, offloaded
        self._copies: dict[fx.Node, fx.Node] = {}
        self._back: list[fx.Node] = []
        self.count = 0

    def provide(self, reader: fx.Node) -> None:
        """Let ``reader`` read what is computed again in place of what is not kept."""
        for node in reader.all_input_nodes:
            if not self._found.exists_later(node, self._dropped):
                reader.replace_input_with(node, self._copy(node, reader))

    def copy_back_early(self) -> None:
        """Let each value from host memory come back when the one before it is read."""
        for one, other in reversed(list(pairwise(self._back))):
            one.append(other)

    def _copy(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """``node`` computed again before ``reader``, if it has not been before; without recursion: chains are long."""
        pending = [node]
        while pending:
            each = pending[-1]
            needed = [] if each in self._offloaded else each.all_input_nodes
            lacking = [operand for operand in needed if self._lacks(operand)]
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
        if node in self._offloaded:
            copy = self._copy_back(node, reader)
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda each: self._copies.get(each, each))
            like, val = Relation.REPLACEMENT, node.meta["val"]
            copy = insert_before(reader, node.target, *args, like=node, relation=like, kwargs=kwargs, val=val)
            copy.meta["recompute_of"] = node.name
        copy.meta["phase"] = reader.meta["phase"]
        self._copies[node] = copy
        self.count += 1

    def _copy_back(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        device, copied = node.meta["val"].device, self._offloaded[node]
        back = insert_before(reader, to_device, copied, device, like=node, relation=Relation.REPLACEMENT)
        self._back.append(back)
        return back
