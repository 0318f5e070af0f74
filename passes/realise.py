"""Choose the ops that perform each collective, by what they cost on the backend of its axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from . import transport
from .base import Numerics, Pass
from .bucket_all_gather import BucketAllGather
from .bucket_all_reduce import BucketAllReduce
from .bucket_reduce_scatter import BucketReduceScatter
from .bucketing import caller
from .collectives import (
    WAIT,
    Kind,
    c10d,
    group_of,
    input_bytes,
    is_wait,
    kind_of,
    operands,
    output_bytes,
    reduction_of,
)
from .costs import BUILT_IN, Table, Way
from .order import settle
from .program import Axis, Program

aten = torch.ops.aten

_KINDS = {c10d.all_reduce.default, c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default}
_BACKENDS = {"gloo"}  # whose own ops are not always the best; NCCL's are
_GATHERS: dict[Way, Any] = {
    Way.BROADCAST: transport.gather_by_broadcast.default,
    Way.SENDING: transport.gather_by_sending.default,
}
_ROWS: dict[str | None, Any] = {"sum": aten.sum.dim_IntList, "max": aten.amax.default, "min": aten.amin.default}
_PAIRS: dict[str | None, Any] = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}


@dataclass(frozen=True)
class Realise(Pass):
    """Each collective is performed in the way that ``table`` says is cheapest for its axis and size.

    On gloo a reduce_scatter becomes an exchange of parts and their sum in the order of ranks, an all_gather a broadcast
    of each part. Other backends keep their ops, and so do tensors on a GPU. What is meant stays in
    ``meta["collective"]``.

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
        late = set[fx.Node]().union(*map(_rewritten, chosen))
        for each in chosen:
            for node in (*each.node.users, each.node):
                program.graph.erase_node(node)
        settle(program.graph, late)
        return len(chosen)

    def _choose(self, program: Program, node: fx.Node) -> _Chosen | None:
        axis = program.mesh.axis_of_group(group_of(node))
        if axis is None or node.target not in _KINDS or not all(map(is_wait, node.users)):
            return None
        backend = self.backend or axis.backend
        link = self.table.link(axis, backend) if backend in _BACKENDS else None
        if link is None or not _on_cpu(node) or not _can_reduce(node):
            return None
        way = link.cheapest(kind_of(node), max(input_bytes(node), output_bytes(node)))
        return None if way is Way.NATIVE else _Chosen(node, way, axis)


@dataclass(frozen=True)
class _Chosen:
    """A collective that other ops are to perform."""

    node: fx.Node
    way: Way
    axis: Axis

    @property
    def kind(self) -> Kind:
        return kind_of(self.node)

    def call(self, op: Any, *args: Any) -> fx.Node:
        """A node in the old one's place and phase."""
        return caller([self.node])(op, *args)

    def start(self, by: str, op: Any, *args: Any) -> fx.Node:
        """A node that starts communication for the old one."""
        node = self.call(op, *args, group_of(self.node))
        node.meta["collective"] = replace(self.node.meta["collective"], by=by)
        return node


def _can_reduce(node: fx.Node) -> bool:
    """Whether rows can be reduced as ``node`` reduces, if it does."""
    reduction, val = reduction_of(node), node.meta["val"]
    return reduction is None or (reduction in _ROWS and val.dtype is not torch.bool)


def _on_cpu(node: fx.Node) -> bool:
    """What gloo was measured with; it copies what lies on a GPU."""
    return bool(operands(node)[0].meta["val"].device.type == "cpu")


def _rewritten(chosen: _Chosen) -> set[fx.Node]:
    """Let other ops do it, for all readers. Returns the nodes that shall stand right before their first reader."""
    if chosen.kind is Kind.ALL_GATHER:
        return _finished(chosen, _gathered(chosen))
    reduced = _reduced(chosen)
    return {*reduced, *_finished(chosen, reduced[-1])}


def _flat(chosen: _Chosen) -> fx.Node:
    operand = operands(chosen.node)[0]
    val = operand.meta["val"]
    if val.ndim == 1:
        return operand
    return chosen.call(aten.view.default if val.is_contiguous() else aten.reshape.default, operand, [-1])


def _reduced(chosen: _Chosen) -> list[fx.Node]:
    """Exchange, and what reduces this rank's part; without the node that starts it."""
    flat, ranks, reduction = _flat(chosen), chosen.axis.size, reduction_of(chosen.node)
    val = operands(chosen.node)[0].meta["val"]
    size = transport.part(val.numel(), ranks, chosen.axis.coordinate)
    if ranks == 2:
        started = chosen.start(f"a swap of halves, then their {reduction}", transport.swap.default, flat, size)
        begin = transport.bounds(val.numel(), ranks)[chosen.axis.coordinate]
        own = chosen.call(aten.slice.Tensor, flat, 0, begin, begin + size)
        other = chosen.call(WAIT, started)  # [size]
        return [own, other, chosen.call(_PAIRS[reduction], own, other)]
    by = f"an exchange of parts, then their {reduction}"
    rows = chosen.call(WAIT, chosen.start(by, transport.exchange.default, flat, ranks, size))  # [ranks, size]
    total = chosen.call(_ROWS[reduction], rows, [0])  # [size]
    if reduction == "sum":
        total.kwargs = {"dtype": val.dtype}  # else integers become int64
    return [rows, total]


def _gathered(chosen: _Chosen) -> fx.Node:
    """The start of a gather of every rank's part."""
    by = "a broadcast of each part" if chosen.way is Way.BROADCAST else "sending each part to each rank"
    total = chosen.node.meta["val"].numel()
    return chosen.start(by, _GATHERS[chosen.way], _flat(chosen), total, chosen.axis.size)


def _finished(chosen: _Chosen, last: fx.Node) -> set[fx.Node]:
    """Wait for what is pending, give it its shape, and let all readers read that."""
    result = chosen.call(WAIT, last) if "collective" in last.meta else last
    late = {result}
    shape = list(chosen.node.meta["val"].shape)
    if len(shape) != 1:
        result = chosen.call(aten.view.default, result, shape)
        late.add(result)
    for wait in chosen.node.users:
        result.meta = {key: value for key, value in wait.meta.items() if key != "val"}
        wait.replace_all_uses_with(result)
    return late
