"""Form regions: compute that lies between collectives becomes functions that a backend takes as a whole."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.aliases import storages
from ..analysis.topological import arrange
from ..base import Numerics, Pass
from ..communication.published import read_by_peers
from ..communication.wait_late import WaitLate
from ..ir.collectives import is_collective, is_shared, is_wait
from ..ir.effects import is_functional, is_pure, is_random
from ..ir.infer_shapes import fill_vals
from ..ir.program import Program
from ..ir.schemas import schema
from ..memory.pieces import tensors
from ..runtime import host_memory
from ..schedule.overlap import Overlap
from ..update.update_last import UpdateLast
from .numbers import take_tensors
from .outline import Names, Outline

_COPIES = (host_memory.to_device, host_memory.to_host, host_memory.wait_copy)


@dataclass(frozen=True)
class FormRegions(Pass):
    """Functional ops of aten between two starts or waits become one region, where no other op has to run in between.

    A region is convex: no path from one of its ops to another leaves it. It stays between the starts and waits that its
    ops stood between, so that it delays no collective; and ops that have no value in common, and wait for different
    collectives, are in different regions. Its ops compute on one device. Outside stay collectives, random draws, ops of
    the user's, kernels of optimizers, what other ranks read, and views of what lies outside: a region returns values,
    and a view of one is taken outside again. Numbers that a call brings enter as tensors (``numbers.py``), which may
    round formulas of an optimizer otherwise. Where fewer than ``min_ops`` ops compute, there is no region.
    """

    min_ops: int = 2
    numerics: ClassVar[Numerics] = "reassociates"
    after: ClassVar[tuple[type[Pass], ...]] = (WaitLate, UpdateLast, Overlap)

    def rewrite(self, program: Program) -> int:
        """Decide for all nodes, then replace the ops of each region by one call; returns how many there are."""
        take_tensors(program)
        fill_vals(program)
        groups = _Groups(program.graph)
        arrange(program.graph, groups.order())
        chosen = [group for group in groups.all() if groups.is_worth_it(group, self.min_ops)]
        names = Names(program.graph)
        for group in chosen:
            outline = Outline(group, groups.found)
            outline.replace(outline.region(names.next(group)))
        return len(chosen)


class _Groups:
    """Groups of ops that can run together: each node's segment, between two starts or waits, and its level in there.

    Nodes of one segment and level depend on each other through ops of regions alone: a path through any other node, or
    to another device, leads to a higher level. So any of them make a convex group, and nodes sorted by level, those
    outside of regions first, follow what they read.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.found = graph, storages(graph)
        starts = [node for node in graph.nodes if is_shared(node)]
        self._published = {each for start in starts for each in read_by_peers(start)}
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.segment: dict[fx.Node, int] = {}
        self.level: dict[fx.Node, int] = {}
        self.inside: set[fx.Node] = set()
        self._waits: dict[fx.Node, frozenset[fx.Node]] = {}  # by which a node outside of regions has what it reads
        segment = 0
        for node in graph.nodes:
            segment += separates(node)
            self._see(node, segment)
            segment += separates(node)

    def _see(self, node: fx.Node, segment: int) -> None:
        self.segment[node] = segment
        if self._can_join(node):
            self.inside.add(node)
        self.level[node] = self._level(node)
        if node in self.inside and any(self._place(each) != self._place(node) for each in bases(node, self.found)):
            self.inside.remove(node)
            self.level[node] = self._level(node)
        reads = node.all_input_nodes if node not in self.inside else []
        waits = frozenset({node}) if is_wait(node) else frozenset().union(*(self._waits[each] for each in reads))
        self._waits[node] = waits

    def _place(self, node: fx.Node) -> tuple[int, int, torch.device]:
        return self.segment[node], self.level[node], _device(node)

    def _level(self, node: fx.Node) -> int:
        level = 0
        for each in node.all_input_nodes:
            if self.segment.get(each) == self.segment[node]:
                is_left = each in self.inside and (node not in self.inside or _device(each) != _device(node))
                level = max(level, self.level[each] + is_left)
        return level

    def _can_join(self, node: fx.Node) -> bool:
        """Whether an op may be in a region, by itself and by where its operands lie."""
        if not is_functional(node) or node in self._published or not is_of_tensors(node) or _is_kernel(node):
            return False
        lies_in = bases(node, self.found)
        others = [each for each in node.all_input_nodes if each not in lies_in]
        is_plain = all(isinstance(each.meta["val"], torch.Tensor) for each in others)  # no list of an op elsewhere
        return is_plain and all(each in self.inside for each in lies_in)

    def is_worth_it(self, group: list[fx.Node], least: int) -> bool:
        """Whether at least ``least`` ops of a group make values in memory of their own, and one is read outside."""
        here = set(group)
        made = [node for node in group if self.found[node] == {node} and node.target is not operator.getitem]
        is_read = any(not here.issuperset(node.users) for node in group)
        return len(made) >= least and is_read

    def order(self) -> list[fx.Node]:
        """All nodes, in an order in which those of a group can stand together."""
        return sorted(self.position, key=lambda node: (self.segment[node], self.level[node], node in self.inside))

    def all(self) -> list[list[fx.Node]]:
        """The groups, each in order, in the order of their first nodes."""
        places: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in self.graph.nodes:
            if node in self.inside:
                places[self._place(node)].append(node)
        found = [group for place in places.values() for group in self._divided(place)]
        return sorted(found, key=lambda group: self.position[group[0]])

    def _divided(self, nodes: list[fx.Node]) -> Iterable[list[fx.Node]]:
        """The parts of a place that have nothing in common; those that wait for the same collectives stay together."""
        import networkx  # type: ignore[import-untyped]  # here: it is 12 MB of modules, and most steps have no region

        here = set(nodes)
        graph = networkx.Graph()
        graph.add_nodes_from(nodes)
        graph.add_edges_from((each, node) for node in nodes for each in node.all_input_nodes if each in here)
        parts: dict[Any, list[fx.Node]] = defaultdict(list)
        for part in networkx.connected_components(graph):
            waits = (self._waits[each] for node in part for each in node.all_input_nodes if each not in here)
            parts[frozenset[fx.Node]().union(*waits)] += part
        return [sorted(part, key=self.position.__getitem__) for part in parts.values()]


def bases(node: fx.Node, found: Mapping[fx.Node, frozenset[fx.Node]]) -> list[fx.Node]:
    """The nodes a region needs to hold ``node``: those it is a view of, and the op that it is one result of."""
    made = node.all_input_nodes if node.target is operator.getitem else []
    return [*made, *(each for each in found[node] if each is not node)]


def separates(node: fx.Node) -> bool:
    """Whether other nodes stay on their side of ``node``: it starts something or waits, or does more than compute."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return False
    if is_collective(node) or is_wait(node) or node.target in _COPIES:
        return True
    return not (is_pure(node) or is_random(node))


def is_of_tensors(node: fx.Node) -> bool:
    """Whether all operands and results are plain tensors of known sizes on one device; numbers of it aside."""
    vals = [val for each in (node, *node.all_input_nodes) for val in _vals(each)]
    if any(not isinstance(val, torch.Tensor) or not _is_plain(val) for val in vals) or not list(_vals(node)):
        return False
    return len({val.device for val in vals if val.ndim or val.device.type != "cpu"}) <= 1


def _vals(node: fx.Node) -> Iterable[Any]:
    val = node.meta.get("val")
    return list(tensors(val)) if isinstance(val, (list, tuple)) else [val]


def _is_plain(val: torch.Tensor) -> bool:
    return val.layout is torch.strided and all(isinstance(size, int) for size in val.shape)


def _is_kernel(node: fx.Node) -> bool:
    """Whether an op is an optimizer's kernel, for which torch has no decomposition."""
    return node.target is not operator.getitem and schema(node.target).name.startswith("_fused_")


def _device(node: fx.Node) -> torch.device:
    return next(iter(tensors(node.meta["val"]))).device
