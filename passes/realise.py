"""Choose the ops that perform each collective, by what they cost on the backend of its axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
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
from .costs import BUILT_IN, Link, Table, Way
from .order import settle
from .program import Axis, Program
from .start_early import readiness

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
    of each part, a large all_reduce both: exchange, wait, sum, start of the gather, wait. Each element is added up on
    one rank, so all ranks get the same bits. The middle of one such all_reduce stands where the next one's operand is
    ready: its exchange runs beside what is computed before that, its gather beside what follows. Other backends keep
    their ops, and so do tensors on a GPU. What is meant stays in ``meta["collective"]``, and is counted once.

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
        meeting = _meeting(program, [each.node for each in chosen if each.kind is Kind.ALL_REDUCE])
        late: set[fx.Node] = set()
        for each in chosen:
            late |= _rewritten(each, meeting.get(each.node))
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
        return None if way is Way.NATIVE else _Chosen(node, way, axis, link)


@dataclass(frozen=True)
class _Chosen:
    """A collective that other ops are to perform."""

    node: fx.Node
    way: Way
    axis: Axis
    link: Link

    @property
    def kind(self) -> Kind:
        return kind_of(self.node)

    def call(self, op: Any, *args: Any) -> fx.Node:
        """A node in the old one's place and phase."""
        return caller([self.node])(op, *args)

    def start(self, by: str, op: Any, *args: Any, continues: bool = False) -> fx.Node:
        """A node that starts communication for the old one."""
        node = self.call(op, *args, group_of(self.node))
        node.meta["collective"] = replace(self.node.meta["collective"], by=by, continues=continues)
        return node


def _can_reduce(node: fx.Node) -> bool:
    """Whether rows can be reduced as ``node`` reduces, if it does."""
    reduction, val = reduction_of(node), node.meta["val"]
    return reduction is None or (reduction in _ROWS and val.dtype is not torch.bool)


def _on_cpu(node: fx.Node) -> bool:
    """What gloo was measured with; it copies what lies on a GPU."""
    return bool(operands(node)[0].meta["val"].device.type == "cpu")


def _meeting(program: Program, reduces: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each all_reduce but the last to start, the node after which the next one can start."""
    ready, nodes = readiness(program), list(program.graph.nodes)
    in_order = sorted(reduces, key=ready.__getitem__)
    return {one: nodes[ready[other]] for one, other in pairwise(in_order)}


def _rewritten(chosen: _Chosen, meeting: fx.Node | None) -> set[fx.Node]:
    """Let other ops do it, for all readers. Returns the nodes that shall stand right before their first reader.

    ``meeting``: after which node the middle of an all_reduce stands, if not there.
    """
    if chosen.kind is Kind.ALL_GATHER:
        return _finished(chosen, _gathered(chosen, _flat(chosen), chosen.way))
    middle = _reduced(chosen)
    if chosen.kind is Kind.REDUCE_SCATTER:
        return {*middle, *_finished(chosen, middle[-1])}
    way = chosen.link.cheapest(Kind.ALL_GATHER, input_bytes(chosen.node), tuple(_GATHERS))
    middle.append(_gathered(chosen, middle[-1], way))
    if meeting is None:
        return {*middle, *_finished(chosen, middle[-1])}
    for node in reversed(middle):
        meeting.append(node)
    return _finished(chosen, middle[-1])


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


def _gathered(chosen: _Chosen, part: fx.Node, way: Way) -> fx.Node:
    """The start of a gather of every rank's part."""
    total, continues = chosen.node.meta["val"].numel(), chosen.kind is not Kind.ALL_GATHER
    by = "a broadcast of each part" if way is Way.BROADCAST else "sending each part to each rank"
    return chosen.start(by, _GATHERS[way], part, total, chosen.axis.size, continues=continues)


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
