"""Memory accesses of the nodes of a final program: the bytes that each reads and writes, and whether it runs anything.

Bytes are named by a space and an interval: the arena with offsets, or the node whose result has memory of its own. A
value may lie in several pieces of memory; then all of them are touched.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..analysis.aliases import is_view
from ..ir.collectives import is_wait
from ..ir.effects import mutates, written
from ..ir.ops import Trait, has
from ..memory.pieces import Pieces, copies, origin_of, tensors
from ..runtime.arena import extent, reserve, view_at, whole
from ..runtime.host_memory import to_device, to_device_out, to_host, wait_copy

Owners = frozenset[fx.Node]  # pieces of memory, by the nodes that name them

COPIES_TO_DEVICE = (to_device, to_device_out)
COPIES = (*COPIES_TO_DEVICE, to_host)


@dataclass(frozen=True)
class Access:
    """Bytes from ``start`` to ``end`` of ``space``, which hold one of ``values``; ``writes`` or reads them."""

    space: fx.Node
    start: int
    end: int
    writes: bool
    values: Owners

    def __str__(self) -> str:
        if self.space.target is reserve:
            return f"bytes {self.start} to {self.end} of {self.space}"
        return f"the memory of {self.space}"


class TouchedMemory:
    """The accesses of the nodes of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.pieces = Pieces(graph)
        self.found = self.pieces.found
        self._made: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # the pieces that an op allocates
        parts = {part: node for node in graph.find_nodes(op="placeholder") for part in self.found[node]}
        for piece in [each for each in graph.nodes if each in self.found[each] and each.target is not view_at]:
            maker = parts.get(piece) or origin_of(piece)
            is_tensor = any(True for _ in tensors(piece.meta.get("val")))
            if is_tensor and (maker.op in ("placeholder", "get_attr") or self.runs(maker)):
                self._made[maker].append(piece)
        self._real = {piece for pieces in self._made.values() for piece in pieces}
        self._returned = {piece for node in graph.output_node().all_input_nodes for piece in self.found[node]}

    def runs(self, node: fx.Node) -> bool:
        """Whether a node computes or moves data; views, and what only stands for a value, do not."""
        if node.op in ("placeholder", "get_attr", "output") or not self._has_tensors(node):
            return False
        if node.target in (reserve, view_at, whole, operator.getitem, wait_copy) or is_wait(node):
            return False
        if is_view(node) and not mutates(node):
            return False
        return not has(node.target, Trait.COMPOSITE) or mutates(node) or copies(node, self.pieces.layouts)

    def of(self, node: fx.Node) -> list[Access]:
        """The accesses of a node that runs. An input is written before the call; outputs are read at its end."""
        if node.op == "output":
            return self._accesses(node.all_input_nodes, writes=False)
        targets = self._targets(node)
        read = [each for each in node.all_input_nodes if each not in targets]
        return [
            *self._accesses(read, writes=False),
            *self._accesses(targets, writes=True),
            *self.allocated(node),
        ]

    def allocated(self, node: fx.Node) -> list[Access]:
        """The memory that a node allocates for its results, or that an input has."""
        return [self._access(piece, frozenset({piece}), writes=True) for piece in self._made.get(node, ())]

    def holders(self, piece: fx.Node) -> list[fx.Node]:
        """The nodes whose value may lie in a piece of memory: it is kept as long as one of them is."""
        return [node for node, pieces in self.found.items() if piece in pieces]

    def stays_on_host(self, space: fx.Node) -> bool:
        """Whether memory is the host's, and somebody may use it after the call.

        What a copy to the host made, and nobody returns, is freed: torch keeps it until copies from and to it are over.
        """
        is_freed = space.target is to_host and space not in self._returned
        return is_on(space, "cpu") and not is_freed

    def _targets(self, node: fx.Node) -> list[fx.Node]:
        """The arguments that a node writes to: all, where it does not declare them."""
        if not mutates(node):
            return []
        return written(node) or node.all_input_nodes

    def _accesses(self, nodes: Any, writes: bool) -> list[Access]:
        pairs = [(node, piece) for node in nodes for piece in sorted(self.found[node])]
        real = [(node, piece) for node, piece in pairs if piece in self._real or piece.target is view_at]
        return [self._access(piece, self.found[node], writes) for node, piece in real]

    def _access(self, piece: fx.Node, values: Owners, writes: bool) -> Access:
        if piece.target is view_at:
            arena, offset, shape, stride, dtype = piece.args
            size = extent(shape, stride) * dtype.itemsize  # type: ignore[arg-type, union-attr]
            return Access(arena, offset, offset + size, writes, values)  # type: ignore[arg-type, operator]
        return Access(piece, 0, 1, writes, values)

    def _has_tensors(self, node: fx.Node) -> bool:
        vals = [node.meta.get("val"), *(each.meta.get("val") for each in node.all_input_nodes)]
        return any(True for val in vals for _ in tensors(val))


def devices_of(node: fx.Node) -> set[torch.device]:
    """The devices of a node's operands and results."""
    vals = [node.meta.get("val"), *(each.meta.get("val") for each in node.all_input_nodes)]
    return {tensor.device for val in vals for tensor in tensors(val)}


def is_on(space: fx.Node, device_type: str) -> bool:
    """Whether memory is that of a kind of device."""
    if space.target is reserve:
        return torch.device(space.args[1]).type == device_type  # type: ignore[arg-type]
    return any(tensor.device.type == device_type for tensor in tensors(space.meta.get("val")))
