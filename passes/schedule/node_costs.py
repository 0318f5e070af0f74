"""Costs of the nodes of a final program on one rank: seconds of compute, or of communication, by a table of rates.

Matrix products take their FLOPs by the measured rate for products of their size; everything else takes the bytes that
it reads and writes, or its elements where functions like ``exp`` take longer than that. Each op that runs at a call
also costs the host a launch. Views of memory that stays where it is are made once, and are free.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..analysis.agreed_sizes import most_bytes
from ..analysis.aliases import is_view
from ..analysis.collective_algorithms import BUILT_IN, MEASURED_MEMBERS, Algorithm, Link, Point, Table
from ..analysis.out_variants import is_constant
from ..analysis.strides import Layouts
from ..ir.collectives import (
    Collective,
    Kind,
    group_of,
    is_collective,
    is_message,
    is_shared,
    is_wait,
    kind_of,
    peer_of,
)
from ..ir.effects import mutates, written
from ..ir.ops import Trait, has
from ..ir.program import Axis, Program
from ..ir.region import Region, region_of
from ..memory.pieces import copies
from ..runtime import coalesced_collectives, message_collectives
from ..runtime.arena import reserve, view_at, whole
from ..runtime.host_memory import to_device, to_device_out, to_host, wait_copy
from .op_work import OpClass, Work, work_of
from .rates import Rates

_BY_ALGORITHM: dict[Algorithm, tuple[Any, ...]] = {
    Algorithm.EXCHANGE: (message_collectives.exchange, message_collectives.swap),
    Algorithm.GATHER_BY_BROADCAST: (message_collectives.gather_by_broadcast,),
    Algorithm.GATHER_BY_SENDING: (message_collectives.gather_by_sending,),
    Algorithm.COALESCED: (
        coalesced_collectives.coalesced_all_gather,
        coalesced_collectives.coalesced_reduce_scatter,
    ),
}
_ALGORITHMS = {packet: algorithm for algorithm, packets in _BY_ALGORITHM.items() for packet in packets}
_COPIES = (to_device, to_device_out, to_host)
COPY_QUEUE = "copy"


@dataclass(frozen=True)
class Transfer:
    """A collective, or a copy between host and device.

    ``queue``: the mesh axis whose transfers it stands in line with, or ``COPY_QUEUE``. ``cpu``: seconds that it takes
    from the core that computes. ``at_wait``: whether the thread that computes does all of it, when it waits.
    """

    queue: str
    seconds: float
    cpu: float = 0.0
    at_wait: bool = False


@dataclass(frozen=True)
class Cost:
    """``launch``: seconds of the host for the call; ``compute``: of the device; ``transfer``: what the node starts."""

    launch: float = 0.0
    compute: float = 0.0
    kind: OpClass | None = None
    transfer: Transfer | None = None


_FREE = Cost()


class NodeCosts:
    """The cost of each node of a program, by ``table``, or by the figures of the device where that has none.

    ``backend`` overrides that of the axes. ``measured``: seconds of ops by the name of their node, where they are known
    better. ``copies_overlap``: whether copies between host and device run beside compute, which needs streams of their
    own.
    """

    def __init__(
        self,
        program: Program,
        rates: Rates,
        table: Table = BUILT_IN,
        *,
        backend: str | None = None,
        measured: Mapping[str, float] | None = None,
        copies_overlap: bool = False,
    ) -> None:
        self.program, self.table, self.backend = program, table, backend
        self.measured, self.copies_overlap = measured or {}, copies_overlap
        self.rates = rates
        self.layouts = Layouts(program.graph)
        self.fixed = _fixed(program)

    def of(self, node: fx.Node) -> Cost:
        """The cost of one node at each call."""
        if node.op in ("placeholder", "output", "get_attr") or node.target is operator.getitem:
            return _FREE
        if is_collective(node):
            return Cost(self.rates.launch, transfer=self._collective(node))
        if is_wait(node) or node.target in (whole, view_at, reserve, wait_copy) or is_constant(node):
            return _FREE
        if self._is_view(node):
            return _FREE if node in self.fixed else Cost(self.rates.view)
        if node.target in _COPIES and self.rates.host_link:
            return self._copy(node)
        region = region_of(node)
        return self._computed(node) if region is None else self._region(node, region)

    def _is_view(self, node: fx.Node) -> bool:
        if has(node.target, Trait.COMPOSITE):
            return not copies(node, self.layouts)
        return (is_view(node) or has(node.target, Trait.UNDECLARED_VIEW)) and not mutates(node)

    def _computed(self, node: fx.Node) -> Cost:
        work = work_of(node)
        compute = self.measured.get(node.name)
        if compute is not None:
            return Cost(0.0, compute, work.kind)
        return Cost(self.rates.launch * work.tensors, self._seconds(work), work.kind)

    def _region(self, node: fx.Node, region: Region) -> Cost:
        """One launch; the arithmetic of all that is inside, and the bytes of operands and results alone."""
        work = work_of(node)
        if node.name in self.measured:
            return Cost(0.0, self.measured[node.name], work.kind)
        inside = sum(self._arithmetic(work_of(each)) for each in region.nodes if each.target is not operator.getitem)
        return Cost(self.rates.launch, max(self.rates.memory(work.bytes, work.fresh), inside), work.kind)

    def _seconds(self, work: Work) -> float:
        return max(self.rates.memory(work.bytes, work.fresh), self._arithmetic(work))

    def _arithmetic(self, work: Work) -> float:
        multiplying = self.rates.products(work.dtype, work.flops, work.product) if work.flops else 0.0
        return multiplying + self.rates.transcendental(work.transcendental)

    def _copy(self, node: fx.Node) -> Cost:
        seconds = work_of(node).bytes / 2 / self.rates.host_link
        if not self.copies_overlap:
            return Cost(self.rates.launch, seconds, OpClass.MEMORY)
        return Cost(self.rates.launch, transfer=Transfer(COPY_QUEUE, seconds))

    def _collective(self, node: fx.Node) -> Transfer:
        axis, described = self.axis_of(node), node.meta.get("collective")
        queue = axis.name if axis and not _passes_by(node, axis) else group_of(node)
        if axis is None or axis.size == 1:
            return Transfer(queue, 0.0)
        if is_message(node):  # those to and from another rank pass by collectives, and those of other pairs
            queue = f"{axis.name} {'to' if kind_of(node) is Kind.SEND else 'from'} {peer_of(node)}"
        kind = described.kind if isinstance(described, Collective) else kind_of(node)
        point = self._point(node, axis, kind)
        return Transfer(queue, point.seconds, min(point.cpu, point.seconds), is_shared(node))

    def axis_of(self, node: fx.Node) -> Axis | None:
        """The axis, or part of one, that a collective communicates along."""
        return self._axes.get(group_of(node))

    @cached_property
    def _axes(self) -> dict[str, Axis]:
        mesh = self.program.mesh
        axes = list(reversed((*mesh.axes, *mesh.subgroups)))
        return {axis.gathers: axis for axis in axes} | {axis.group: axis for axis in axes}

    def _link(self, axis: Axis, backend: str) -> Link | None:
        """The link of an axis; a fake one stands for whatever the table describes."""
        if backend == "fake" and self.table.links:
            backend = self.table.links[0].backend
        return self.table.link(axis, backend) or self.rates.link(axis, backend)

    def _point(self, node: fx.Node, axis: Axis, kind: Kind) -> Point:
        """Seconds and CPU seconds: as measured for this algorithm, else for the backend's own op, else by the rate."""
        backend, size = self.backend or axis.backend, most_bytes(node)
        link = self._link(axis, backend)
        algorithm = _algorithm(node)
        if link is not None and (point := _measured(link, kind, algorithm, size, node)) is not None:
            return point
        rate = (link.rate(axis) if link is not None else None) or self.table.rate(axis, backend)
        sent = size * (axis.size - 1) / axis.size * (2 if kind is Kind.ALL_REDUCE else 1)
        return Point(size, rate.seconds(size if is_message(node) else sent), 0.0)


def _passes_by(node: fx.Node, axis: Axis) -> bool:
    """Whether a collective is in a group of its own along ``axis``, so that it need not stand in line."""
    return axis.backend != "nccl" and group_of(node) == axis.gathers


def _measured(link: Link, kind: Kind, algorithm: Algorithm, size: int, node: fx.Node) -> Point | None:
    if algorithm is Algorithm.COALESCED:
        members = max(1, len(next((arg for arg in node.args if isinstance(arg, (list, tuple))), ())))
        point = link.point(kind, algorithm, MEASURED_MEMBERS * size // members)
        share = members / MEASURED_MEMBERS
        if point is not None:
            return Point(size, point.seconds * share, point.cpu * share)
    return link.point(kind, algorithm, size) or link.point(kind, Algorithm.NATIVE, size)


def _algorithm(node: fx.Node) -> Algorithm:
    if is_shared(node):
        return Algorithm.SHARED
    packet = getattr(node.target, "overloadpacket", None)
    return _ALGORITHMS.get(packet, Algorithm.NATIVE)


def device_of(program: Program) -> torch.device:
    """The device that a program computes on: that of most of its tensors which is not the host, else the host."""
    devices = [val.device for node in program.placeholders if isinstance(val := node.meta.get("val"), torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _fixed(program: Program) -> set[fx.Node]:
    """The nodes whose values lie at the same address at every call: views of them are made once."""
    inputs = zip(program.placeholders, program.inputs, strict=True)
    fixed = {node for node, declared in inputs if declared.role.is_state}
    for node in program.graph.nodes:
        if node.op == "call_function" and _stays(node, fixed):
            fixed.add(node)
    return fixed


def _stays(node: fx.Node, fixed: set[fx.Node]) -> bool:
    if node.target is reserve or is_constant(node):
        return True
    inside = _lies_in(node)
    return bool(inside) and fixed.issuperset(inside)


def _lies_in(node: fx.Node) -> list[fx.Node]:
    """The nodes in whose memory a result lies, if in nothing else."""
    if is_collective(node) or mutates(node):
        return written(node)
    if is_view(node) or is_wait(node) or node.target in (whole, view_at):
        return node.all_input_nodes
    return []
