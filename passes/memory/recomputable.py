"""Saved activations and how to recompute each.

Forward keeps a value whose memory backward or the update reads. Its op can run again there if what it reads still
exists then: inputs, gathered parameters, values that are kept, and all that can be computed again of these. What no
rank can compute alone, such as the mean of a global batch, is kept for it. Random ops are functions of a seed, so that
one that runs again draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from torch import fx

from ..analysis.aliases import escaping, is_view
from ..analysis.reachability import reached
from ..ir.collectives import is_collective, is_wait
from ..ir.effects import is_pure, is_random
from ..ir.program import Program
from ..ir.roles import Phase, Role
from .pieces import Pieces, origin_of

_LATER = (Phase.BACKWARD, Phase.UPDATE)


class Recomputable:
    """The ops of forward whose results a program keeps for later phases; ``kept``: their bytes, by op, in order.

    Of ops that can run again, and of no memory that lives on after the call.
    """

    def __init__(self, program: Program) -> None:
        self._pieces = Pieces(program.graph)
        read_later = self._read_later(program.graph)
        escapes = escaping(program.graph, self._pieces.found)
        sizes = {piece.node: piece.size for piece in self._pieces.all}
        self._kept = {origin_of(piece) for piece in read_later}
        self._can_go = cache(lambda op: can_run_again(op) and not _lasts(op))
        self.kept: dict[fx.Node, int] = {}
        for piece, size in sizes.items():
            op = origin_of(piece)
            if piece in read_later and piece not in escapes and can_run_again(op):
                self.kept[op] = self.kept.get(op, 0) + size

    def ops_for(self, op: fx.Node, dropped: Iterable[fx.Node]) -> list[fx.Node]:
        """The ops of forward that run again to have the result of ``op`` if ``dropped`` is not kept, in their order."""
        lacking = set(dropped)

        def needed(each: fx.Node) -> list[fx.Node]:
            return [made for operand in each.all_input_nodes for made in self._lacking(operand, lacking)]

        return sorted(reached([op], needed))

    def exists_later(self, node: fx.Node, dropped: set[fx.Node]) -> bool:
        """Whether the value of ``node`` is there in backward if the results of ``dropped`` are not kept.

        What backward makes itself is, also a view: that is one of what runs again by then.
        """
        return node.meta.get("phase") in _LATER or not self._lacking(node, dropped)

    def is_gone(self, op: fx.Node, dropped: set[fx.Node]) -> bool:
        """Whether what an op made is not there in backward: forward did not keep it, and backward did not make it.

        What cannot run again is there as soon as it is read, since it is kept for that then.
        """
        return (op in dropped or op not in self._kept) and self._can_go(op)

    def _lacking(self, node: fx.Node, dropped: set[fx.Node]) -> list[fx.Node]:
        """The ops that made what is gone of the memory that a value lies in."""
        ops = [origin_of(piece) for piece in self._pieces.found[node]]
        return [op for op in ops if self.is_gone(op, dropped)]

    def _read_later(self, graph: fx.Graph) -> set[fx.Node]:
        """The pieces of memory that ops of later phases read."""
        later = [node for node in graph.nodes if node.meta.get("phase") in _LATER]
        return {piece for node in later for operand in node.all_input_nodes for piece in self._pieces.found[operand]}


def can_run_again(node: fx.Node) -> bool:
    """Whether an op of forward gives the same result when it runs once more, without another rank's help."""
    alone = is_pure(node) and not is_random(node) and not is_collective(node) and not is_wait(node)
    return alone and node.meta.get("phase") is Phase.FORWARD


def _lasts(op: fx.Node) -> bool:
    """Whether the result of an op is there throughout, or can be had again: an input, or a gathered parameter."""
    if is_collective(op):
        return op.meta["collective"].role is Role.PARAMETER
    return op.op in ("placeholder", "get_attr") or is_view(op)
