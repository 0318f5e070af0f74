"""Measured times of the nodes of a step, and their sums for a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import fx

from .ir.collectives import is_collective, is_wait
from .ir.program import Program
from .ir.schemas import name_of
from .schedule.simulation import Timeline


@dataclass(frozen=True)
class OpTime:
    """The compute of all nodes of one op: seconds of a step by estimate, where there is one, and as measured."""

    op: str
    count: int
    estimated: float
    measured: float


@dataclass(frozen=True)
class IslandTime:
    """One distinct island of a program (``FormIslands``), named after the first of its ``calls``.

    ``nodes``: ops inside; ``bytes``: those that ops by themselves would read and write besides what the island does.
    ``aten`` and ``kernels``: seconds of a call on this rank, op by op and as kernels. ``is_taken``: by all ranks, as
    kernels are quicker in their sum; ``why``: the reason that there are no kernels.
    """

    name: str
    nodes: int
    calls: int
    bytes: int
    aten: float = 0.0
    kernels: float = 0.0
    is_taken: bool = False
    why: str = ""


@dataclass(frozen=True)
class MeasuredTime:
    """One step of one rank as it ran, node by node: medians over ``calls`` calls.

    ``seconds``: from the first node to the last. ``communication``: of these, how long the thread that computes was
    busy with collectives, from start to end, or waited for them and for late ranks; ``compute``: the rest.
    ``nodes``: seconds of each node, by its name in a dump; ``ops``: the sums for each op, longest first.
    """

    calls: int
    seconds: float
    compute: float
    communication: float
    nodes: dict[str, float] = field(default_factory=dict)
    ops: tuple[OpTime, ...] = ()

    @classmethod
    def of(cls, program: Program, estimated: Timeline | None, calls: Sequence[Mapping[str, float]]) -> MeasuredTime:
        """The medians of calls that each give seconds by the names of nodes."""
        nodes = {name: median(call[name] for call in calls) for name in calls[0]}
        awaited = {node.name for node in program.graph.nodes if collective_of(node) is not None}
        communication = [sum(seconds for name, seconds in call.items() if name in awaited) for call in calls]
        totals = [sum(call.values()) for call in calls]
        compute = [total - part for total, part in zip(totals, communication, strict=True)]
        ops = _ops(program, estimated, nodes, awaited)
        return cls(len(calls), median(totals), median(compute), median(communication), nodes, ops)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> MeasuredTime:
        """Read the output of ``dataclasses.asdict``."""
        return cls(**{**given, "ops": tuple(OpTime(**each) for each in given["ops"])})


def collective_of(node: fx.Node) -> fx.Node | None:
    """The collective that a node starts or waits for."""
    if is_collective(node):
        return node
    started = node.args[0] if is_wait(node) else None
    while isinstance(started, fx.Node) and not is_collective(started):  # one of a coalesced result
        started = started.args[0] if started.args else None
    return started if isinstance(started, fx.Node) else None


def _ops(
    program: Program, estimated: Timeline | None, nodes: Mapping[str, float], awaited: set[str]
) -> tuple[OpTime, ...]:
    expected = {span.node: span.end - span.start for span in estimated.spans if not span.queue} if estimated else {}
    found: dict[str, list[str]] = {}
    for node in program.graph.nodes:
        if node.name in nodes and node.name not in awaited:
            found.setdefault(name_of(node.target), []).append(node.name)
    rows = [
        OpTime(op, len(each), sum(expected.get(name, 0.0) for name in each), sum(nodes[name] for name in each))
        for op, each in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.measured))
