"""Choose the ops that perform each collective, by what they cost on the backend of its axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from . import by_memory, by_messages
from .base import Numerics, Pass
from .bucket_all_gather import BucketAllGather
from .bucket_all_reduce import BucketAllReduce
from .bucket_reduce_scatter import BucketReduceScatter
from .chosen import Chosen
from .collectives import (
    c10d,
    group_of,
    input_bytes,
    is_wait,
    kind_of,
    operands,
    output_bytes,
    reduction_of,
)
from .costs import BUILT_IN, Table, Way, ways_along
from .order import settle
from .program import Program

aten = torch.ops.aten

_KINDS = {c10d.all_reduce.default, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default}
_BACKENDS = {"gloo"}  # whose own ops are not always the best; NCCL's are


@dataclass(frozen=True)
class Realise(Pass):
    """Each collective is performed in the way that ``table`` says is cheapest for its axis and size.

    On gloo a reduce_scatter becomes an exchange of parts and their sum in the order of ranks, an all_gather a broadcast
    of each part. Where the ranks of an axis are on one host, they read each other's memory, member by member of a
    bucket, which is neither packed nor unpacked then. Other backends keep their ops, and so do tensors on a GPU. What
    is meant stays in ``meta["collective"]``.

    ``backend`` takes the place of the axes' own backend, to see on fake ranks what gloo would do. A compiler that plans
    memory by itself must know that operands are read until the wait; without this pass it sees torch's own ops only.
    """

    table: Table = BUILT_IN
    backend: str | None = None
    numerics: ClassVar[Numerics] = "reassociates"
    after: ClassVar[tuple[type[Pass], ...]] = (BucketAllGather, BucketReduceScatter, BucketAllReduce)

    def rewrite(self, program: Program) -> int:
        """Choose for all, then rewrite; returns how many collectives are no longer performed by their own op."""
        chosen = [each for node in program.collectives() if (each := self._choose(program, node))]
        late = set[fx.Node]().union(*map(_written, chosen))
        settle(program.graph, late)
        return len(chosen)

    def _choose(self, program: Program, node: fx.Node) -> Chosen | None:
        axis = program.mesh.axis_of_group(group_of(node))
        if axis is None or node.target not in _KINDS or not all(map(is_wait, node.users)):
            return None
        backend = self.backend or axis.backend
        link = self.table.link(axis, backend) if backend in _BACKENDS else None
        if link is None or not _on_cpu(node):
            return None
        ways = [way for way in ways_along(axis, kind_of(node)) if way is Way.NATIVE or _can_reduce(node, way)]
        way = link.cheapest(kind_of(node), max(input_bytes(node), output_bytes(node)), ways)
        return None if way is Way.NATIVE else Chosen(node, way, axis)


def _can_reduce(node: fx.Node, way: Way) -> bool:
    """Whether a way can reduce as ``node`` reduces, if it does."""
    reduction = reduction_of(node)
    known = by_memory.REDUCTIONS if way is Way.SHARED else by_messages.REDUCTIONS
    return reduction is None or (reduction in known and node.meta["val"].dtype is not torch.bool)


def _on_cpu(node: fx.Node) -> bool:
    """What gloo was measured with; it copies what lies on a GPU."""
    return bool(operands(node)[0].meta["val"].device.type == "cpu")


def _written(chosen: Chosen) -> set[fx.Node]:
    """Let other ops do it, for all readers. Returns the nodes that shall stand right before their first reader."""
    late = by_memory.write(chosen) if chosen.way is Way.SHARED else by_messages.write(chosen)
    operand = chosen.operand
    for node in (*chosen.node.users, chosen.node):
        node.graph.erase_node(node)
    if not operand.users and operand.target is aten.cat.default:
        operand.graph.erase_node(operand)  # it packed what is sent as it lies now
    return late
