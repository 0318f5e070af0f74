"""The pieces of memory that a graph computes in, as it stands: how large each is, and how long it is needed.

A piece is named by the node whose result it holds. Where an arena is planned (``ReuseMemory``), a view of the arena
names it; pieces may then overlap, since an op writes over an operand, and lie in each other.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..analysis.aliases import Storages, last_reads, of_each_result, storages
from ..analysis.strides import Layouts
from ..communication.published import read_by_all, read_by_peers
from ..ir.collectives import is_shared
from ..ir.ops import Trait, has
from ..runtime.arena import extent, reserve, view_at, whole

aten = torch.ops.aten


@dataclass(frozen=True)
class Space:
    """Memory that is planned by itself: that of a device, or what local ranks read."""

    device: torch.device
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.device}, shared with local ranks" if self.shared else str(self.device)

    @classmethod
    def of(cls, arena: fx.Node) -> Space:
        """The space that an arena lies in."""
        return cls(*arena.args[1:])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Piece:
    """``size`` bytes that hold ``node`` from position ``first`` to ``last``; ``offset``: in the arena, if in one."""

    node: fx.Node
    space: Space
    size: int
    first: int
    last: int
    offset: int | None = None

    @property
    def is_state(self) -> bool:
        """Whether the memory is there before the call, and after it."""
        return self.node.op in ("placeholder", "get_attr")

    @property
    def is_allocated(self) -> bool:
        """Whether an op allocates it."""
        return self.offset is None and not self.is_state


class Pieces:
    """The pieces of a graph; ``found``: those that the value of each node may lie in, by the node that names them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.layouts = Layouts(graph)
        self.found = storages(graph, _of_their_own(graph, self.layouts))
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self._parts = {part for node in graph.find_nodes(op="placeholder") for part in self.found[node] - {node}}
        self._first, self._last = self._first_uses(), self._last_uses()
        sizes = self._sizes()
        self.all = [self._piece(node, size) for node, size in sizes.items() if size > 0]

    def _piece(self, node: fx.Node, size: int) -> Piece:
        if node.op in ("placeholder", "get_attr"):
            return Piece(node, Space(node.meta["val"].device), size, 0, len(self.position))
        first = self._first.get(node, self.position[origin_of(node)])
        last = max(first, self._last.get(node, first))
        if node.target is view_at:
            arena, offset = node.args[:2]
            return Piece(node, Space.of(arena), size, first, last, offset)  # type: ignore[arg-type]
        return Piece(node, Space(next(tensors(node.meta["val"])).device), size, first, last)

    def _first_uses(self) -> dict[fx.Node, int]:
        """When views of an arena are first written to; a concatenation in place, when the first of its parts is."""
        first: dict[fx.Node, int] = {}
        for node in self.graph.find_nodes(op="call_function", target=view_at):
            first[node] = min(self._written(user) for user in node.users)
        for node in self.graph.find_nodes(op="call_function", target=whole):
            view: Any = node.args[0]
            parts = [first[piece] for piece in self.found[node] if piece in first]
            first[view] = min(parts)
        return first

    def _written(self, node: fx.Node) -> int:
        """The position at which a result is written: at the wait, if the ranks share memory."""
        return min(self.position[each] for each in (node.users if is_shared(node) else [node]))

    def _last_uses(self) -> dict[fx.Node, int]:
        last = last_reads(self.graph, self.found)
        shared = [node for node in self.graph.nodes if is_shared(node)]
        for start in shared:
            read = read_by_all(start, shared, self.position)
            last |= {p: max(last.get(p, read), read) for operand in read_by_peers(start) for p in self.found[operand]}
        return last

    def _sizes(self) -> dict[fx.Node, int]:
        """The bytes of each piece. Results that were taken out of a tuple have pieces of their own."""
        sizes: Counter[fx.Node] = Counter()
        for node in self.graph.nodes:
            if node not in self.found[node] or node in self._parts or not self._allocates(node):
                continue
            sizes[node] = _bytes(node)
            if node.target is operator.getitem:
                sizes[origin_of(node)] -= sizes[node]
        return sizes

    def _allocates(self, node: fx.Node) -> bool:
        """Whether a piece has memory: an op that may return a view of its operand does so where it can."""
        if node.target in (reserve, whole) or has(node.target, Trait.UNDECLARED_VIEW):
            return False
        return not has(node.target, Trait.COMPOSITE) or copies(node, self.layouts)


def tensors(val: Any) -> Iterator[torch.Tensor]:
    """The tensors of a node's value, however deep in lists."""
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, (list, tuple)):
        for each in val:
            yield from tensors(each)


def _bytes(node: fx.Node) -> int:
    if node.target is view_at:
        _, _, shape, stride, dtype = node.args
        return extent(shape, stride) * dtype.itemsize  # type: ignore[arg-type, union-attr]
    return sum(val.nbytes for val in tensors(node.meta.get("val")))


def _of_their_own(graph: fx.Graph, layouts: Layouts) -> dict[fx.Node, Storages]:
    """The nodes that have memory of their own: views of an arena, copies, and each result of an op with several."""
    known = of_each_result(graph)
    for node in graph.nodes:
        copied = has(node.target, Trait.COMPOSITE) and copies(node, layouts)
        if node.target is view_at or copied:
            known[node] = frozenset({node})
    return known


def copies(node: fx.Node, layouts: Layouts) -> bool:
    """Whether an op that gives its operand back, or a view of it, where it can, has to copy."""
    source = next(iter(node.all_input_nodes), None)
    if source is None or not isinstance(source.meta.get("val"), torch.Tensor):
        return True
    if has(node.target, Trait.RESHAPES):
        return not layouts.is_viewable(source, node.meta["val"].shape)
    return not layouts.have_same_layout(source, node)


def origin_of(node: fx.Node) -> fx.Node:
    """The op whose result an entry is, perhaps one of a list among several."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node
