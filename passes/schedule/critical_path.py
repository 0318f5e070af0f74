"""The critical path of a simulated step: the chain of ops and transfers that its time is made of.

Whatever is not on it may take a little longer without making the step longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import fx

from ..ir.collectives import Collective, is_wait
from ..ir.program import Program
from ..runtime.host_memory import wait_copy
from .simulation import Span, Timeline

COMPUTE = "compute"
_BEGIN = Span("", 0.0, 0.0)


@dataclass(frozen=True)
class PathPart:
    """A part of the time of a step along its critical path.

    ``what``: a kind of collective, ``"copy"`` between host and device, or ``"compute"``; ``where``: the mesh axis of
    the collectives, or the phase of the ops. ``count``: how many of them are on the path.
    """

    what: str
    where: str
    seconds: float
    count: int


@dataclass
class _Chains:
    """The spans of a step, and for each those that must end before it begins."""

    before: dict[Span, set[Span]] = field(default_factory=dict)
    last: dict[str, Span] = field(default_factory=dict)  # by queue, in the order of the program
    blocked_by: set[Span] = field(default_factory=set)  # what the computing thread has waited for since its last span

    def add(self, span: Span, operands: set[Span]) -> None:
        """The next span of its queue; a transfer is issued by the thread that computes."""
        own, thread = self.last.get(span.queue), self.last.get("")
        self.before[span] = operands | self.blocked_by | {each for each in (own, thread) if each is not None}
        if not span.queue:
            self.blocked_by = set()
        self.last[span.queue] = span


def critical_path(program: Program, timeline: Timeline) -> tuple[PathPart, ...]:
    """The parts of the longest chain of spans of a step, the longest part first.

    A span depends on the one before it in its queue, on those that bring its operands, and on those that the thread
    which issues it has waited for.
    """
    import networkx  # type: ignore[import-untyped]  # here: it is 12 MB of modules, and only reports need it

    chains = _chains(program, timeline)
    graph = networkx.DiGraph()
    graph.add_nodes_from(chains.before)
    for span, before in chains.before.items():
        # What leads here counts with all it takes; the begin of the step leads to the first of a chain.
        graph.add_weighted_edges_from((each, span, span.end - span.start) for each in before or {_BEGIN})
    path: list[Span] = networkx.dag_longest_path(graph)
    nodes = {node.name: node for node in program.graph.nodes}
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in path:
        if span is not _BEGIN:
            sums[_kind(nodes[span.node], span)].append(span.end - span.start)
    parts = [PathPart(*kind, sum(each), len(each)) for kind, each in sums.items()]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def in_all(paths: Iterable[Sequence[PathPart]]) -> tuple[PathPart, ...]:
    """The parts of several paths, one after the other; the longest part first."""
    sums: dict[tuple[str, str], list[PathPart]] = defaultdict(list)
    for part in chain.from_iterable(paths):
        sums[part.what, part.where].append(part)
    parts = [PathPart(*kind, sum(p.seconds for p in each), sum(p.count for p in each)) for kind, each in sums.items()]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _chains(program: Program, timeline: Timeline) -> _Chains:
    """The spans of the nodes in order, with what each of them depends on."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.node].append(span)
    moved = {each.node: (each.start, each.end) for each in timeline.transfers}
    chains, brought = _Chains(), dict[fx.Node, Span]()  # by value, the span that ends last of those that bring it
    at_wait: dict[fx.Node, Span] = {}  # of collectives that run where they are waited for
    for node in program.graph.nodes:
        operands = {brought[each] for each in node.all_input_nodes if each in brought}
        own = sorted(spans.get(node.name, ()), key=lambda span: (span.start, span.end))
        for span in own:
            if not span.queue and (span.start, span.end) == moved.get(node.name):
                at_wait[node] = span
        own = [span for span in own if span is not at_wait.get(node)]
        if is_wait(node) or node.target is wait_copy:
            own += [at_wait.pop(each) for each in node.all_input_nodes if each in at_wait]
            chains.blocked_by |= operands
        for span in own:
            chains.add(span, operands)
        latest = max([*own, *operands], key=lambda span: span.end, default=None)
        if latest is not None:
            brought[node] = latest
    return chains


def _kind(node: fx.Node, span: Span) -> tuple[str, str]:
    described = node.meta.get("collective")
    if isinstance(described, Collective) and described.kind:
        return str(described.kind), described.axis
    return ("copy", span.queue) if span.queue else (COMPUTE, str(node.meta.get("phase") or ""))
