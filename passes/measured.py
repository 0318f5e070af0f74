"""Measured times of the nodes of a step, and their sums for a report."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import fx

from .ir.bundle import Bundle, run_names
from .ir.collectives import channel_of, is_collective, is_message, is_wait
from .ir.program import Program
from .ir.schemas import name_of
from .schedule.lanes import Bar
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
    ``nodes``: seconds of each node, by its name in a dump; ``ops``: the sums for each op, longest first. Of a pipeline
    each run has its own: ``forward.0 of 3: mm`` is a node on micro-batch 3, ``forward.0: mm`` an op of this stage.
    """

    calls: int
    seconds: float
    compute: float
    communication: float
    nodes: dict[str, float] = field(default_factory=dict)
    ops: tuple[OpTime, ...] = ()

    @classmethod
    def of(
        cls,
        program: Program,
        estimated: Timeline | None,
        calls: Sequence[Mapping[str, float]],
        bars: Sequence[Bar] = (),
    ) -> MeasuredTime:
        """The medians of calls, each of seconds by the names of nodes; ``bars``: the runs of a stage, estimated."""
        nodes = {name: median(call[name] for call in calls) for name in calls[0]}
        awaited = collectives_of_call(program).keys()
        communication = [sum(seconds for name, seconds in call.items() if name in awaited) for call in calls]
        totals = [sum(call.values()) for call in calls]
        compute = [total - part for total, part in zip(totals, communication, strict=True)]
        ops = _ops(program, _expected(estimated, bars), nodes, awaited)
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


def _nodes_of_call(program: Program) -> Iterator[tuple[str, str, fx.Node]]:
    """The nodes that run, with their run (``forward.0 of 3``) and the role of its program; empty for the only one."""
    if program.stages is None:
        yield from (("", "", node) for node in program.graph.nodes)
        return
    bundle: Bundle = program.stages
    (call,) = bundle.calls
    order = bundle.order(call, bundle.coordinate_of(program))
    for run, role in zip(run_names(order), order, strict=True):
        yield from ((run, role, node) for node in bundle.programs[role].graph.nodes)


def _named(run: str, node: fx.Node) -> str:
    return f"{run}: {node.name}" if run else node.name


def collectives_of_call(program: Program) -> dict[str, str]:
    """The collective that each node starts or waits for, by the names of ``MeasuredTime``, in the order of a call."""
    found, under_way = dict[str, str](), defaultdict[str, list[str]](list)  # messages, by channel
    for run, role, node in _nodes_of_call(program):
        started, name = collective_of(node), _named(run, node)
        if started is not None:
            found[name] = _named(run, started)
            if started is node and is_message(node):
                under_way[channel_of(node)].append(name)
        elif is_wait(node) and role:  # for a message that a program before has started: pending.sent.CHANNEL
            _, _, channel = program.stages.programs[role].inputs[_position(node.args[0])].name.split(".", 2)
            found[name] = under_way[channel].pop(0)
    return found


def _position(placeholder: Any) -> int:
    return list(placeholder.graph.find_nodes(op="placeholder")).index(placeholder)


def _expected(estimated: Timeline | None, bars: Sequence[Bar]) -> dict[str, float]:
    """The estimated seconds of each node that computes."""
    spans = [span for span in estimated.spans if not span.queue] if estimated else []
    if not bars:
        return {span.node: span.end - span.start for span in spans}
    starts = [bar.start for bar in bars]
    runs = [bars[max(bisect_right(starts, span.start) - 1, 0)].text for span in spans]
    return {f"{run}: {span.node}": span.end - span.start for run, span in zip(runs, spans, strict=True)}


def _ops(
    program: Program, expected: Mapping[str, float], nodes: Mapping[str, float], awaited: Collection[str]
) -> tuple[OpTime, ...]:
    found: dict[str, list[str]] = {}
    for run, role, node in _nodes_of_call(program):
        name = _named(run, node)
        if name in nodes and name not in awaited:
            found.setdefault(f"{role}: {name_of(node.target)}" if role else name_of(node.target), []).append(name)
    rows = [
        OpTime(op, len(each), sum(expected.get(name, 0.0) for name in each), sum(nodes[name] for name in each))
        for op, each in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.measured))
