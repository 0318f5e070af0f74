"""Which values of a program can lie in planned memory, and which in each other's: the analysis of ReuseMemory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .._torch import OpOverload, c10d
from ..analysis.aliases import escaping, last_reads, storages
from ..analysis.out_variants import is_constant, out_variant, results_of
from ..analysis.strides import Layouts, is_dense
from ..communication.published import read_by_peers
from ..ir.collectives import is_shared
from ..runtime.arena import extent

aten = torch.ops.aten


@dataclass(eq=False)
class Lodger:
    """One result that gets a place: a block of its own, or ``offset`` bytes into the memory of ``host``.

    Of a block, ``first`` and ``last`` are the positions between which all that lies in it is needed.
    """

    val: torch.Tensor
    first: int
    last: int
    host: Lodger | None = None
    offset: int = 0
    settled: bool = False  # it cannot move any more: it is part of a whole, or has parts itself
    shared: bool = False  # of a block: other ranks look at it, until all ranks meet at the next call

    @property
    def size(self) -> int:
        """Bytes."""
        return extent(self.val.shape, self.val.stride()) * self.val.element_size()

    def block(self) -> tuple[Lodger, int]:
        """The block that this lies in, and where in it."""
        at, offset = self, 0
        while at.host is not None:
            at, offset = at.host, offset + at.offset
        return at, offset

    def move_into(self, host: Lodger, offset: int) -> None:
        """Lie in the memory of another from now on, which lives as long."""
        self.host, self.offset = host, offset
        block, _ = host.block()
        block.first, block.last = min(block.first, self.first), max(block.last, self.last)


class Lodgers:
    """All of them, by the node that makes them; a node with several results has several."""

    def __init__(self, graph: fx.Graph) -> None:
        self.layouts = Layouts(graph)
        self.found = storages(graph)
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.of: dict[fx.Node, list[Lodger]] = {}
        self.wholes: dict[fx.Node, list[Lodger | None]] = {}  # of each member that which lies in it by itself
        kept, last = escaping(graph, self.found), last_reads(graph, self.found)
        for node in graph.nodes:
            if node not in kept:
                self._take_in(node, last.get(node, 0))
        for node in graph.nodes:
            self._join_parts(node)
        for node in graph.nodes:
            if is_shared(node):
                self._share(node)
        for node in graph.nodes:
            self._take_over(node)

    def all(self) -> list[Lodger]:
        """In the order of the graph."""
        return [lodger for each in self.of.values() for lodger in each]

    def _take_in(self, node: fx.Node, last: int) -> None:
        if self.found[node] != {node} or (is_constant(node) and self.layouts.is_even(node)):
            return
        vals = results_of(node)
        if out_variant(node) is not None and all(map(_is_plain, vals)):
            first = self._written(node)
            self.of[node] = [Lodger(val, first, max(first, last)) for val in vals]

    def _written(self, node: fx.Node) -> int:
        """When the first of its results is written: of what ranks read from each other, at the wait."""
        return min(self.position[user] for user in node.users) if is_shared(node) else self.position[node]

    def _join_parts(self, node: fx.Node) -> None:
        """Let what ``node`` concatenates lie in its part of the whole, so that nothing is left to do for it."""
        if node not in self.of or not _concatenates(node) or not self.layouts.is_contiguous(node):
            return
        (whole,), offset = self.of[node], 0
        joined: list[Lodger | None] = []
        for member in node.args[0]:  # type: ignore[union-attr]
            val: torch.Tensor = member.meta["val"]  # type: ignore[union-attr]
            part = self._shown(member) if self.layouts.is_contiguous(member) and val.dtype is whole.val.dtype else None  # type: ignore[arg-type]
            if part is whole or (part is not None and part.host is not None):
                part = None
            if part is not None:
                part.move_into(whole, offset)
                part.settled = whole.settled = True
            joined.append(part)
            offset += val.numel() * whole.val.element_size()
        if any(joined):
            self.wholes[node] = joined

    def _share(self, start: fx.Node) -> None:
        """Let operand and scratch of a collective lie where others can look at them, and nothing else ever."""
        for read in read_by_peers(start):
            for block in self._blocks(read):
                block.shared = block.settled = True

    def _take_over(self, node: fx.Node) -> None:
        """Let ``node`` write over an operand that nobody reads afterwards."""
        if node not in self.of or self.of[node][0].settled or not _is_elementwise(node):
            return
        mine = self.of[node][0]
        for operand in node.all_input_nodes:
            host = self._shown(operand)
            if host is None or not self.layouts.are_alike(operand, node):
                continue
            block, _ = host.block()
            if block.shared:
                continue
            sharing = [other for other in node.all_input_nodes if block in self._blocks(other)]
            if block.last <= self.position[node] and all(self.layouts.are_alike(other, node) for other in sharing):
                mine.move_into(host, 0)
                return

    def _shown(self, node: fx.Node) -> Lodger | None:
        """The one value whose memory ``node`` shows, all of it."""
        if len(self.found[node]) != 1:
            return None
        (storage,) = self.found[node]
        lodgers = self.of.get(storage, [])
        val = node.meta["val"]
        same = len(lodgers) == 1 and (lodgers[0].val.numel(), lodgers[0].val.dtype) == (val.numel(), val.dtype)
        return lodgers[0] if same and self.layouts.is_known(node) and is_dense(val) else None

    def _blocks(self, node: fx.Node) -> list[Lodger]:
        """The blocks that ``node`` may lie in."""
        return [lodger.block()[0] for storage in self.found[node] for lodger in self.of.get(storage, [])]


def _concatenates(node: fx.Node) -> bool:
    """Whether ``node`` puts whole tensors one after the other."""
    if node.target not in (aten.cat.default, aten.stack.default):
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    members = node.args[0]
    return bool(dim == 0) and isinstance(members, (list, tuple)) and all(isinstance(each, fx.Node) for each in members)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends on those at its place alone, and may be written over one of them."""
    if node.target is c10d.all_reduce.default:
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_plain(val: torch.Tensor) -> bool:
    """Whether shape and strides are all there is to know of a tensor. What an op writes as it likes has no gaps."""
    if val.layout is not torch.strided or bool(val.is_conj()) or bool(val.is_neg()):
        return False
    return all(isinstance(each, int) for each in (*val.shape, *val.stride()))
