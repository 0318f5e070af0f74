"""Form islands: pointwise ops, reductions and views between matrix products become regions of a kernel or a few."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.aliases import is_view, storages
from ..analysis.strides import Layouts, overlaps
from ..analysis.topological import arrange
from ..base import Numerics, Pass
from ..communication.wait_late import WaitLate
from ..ir.effects import is_functional
from ..ir.infer_shapes import fill_vals
from ..ir.ops import Trait, aten, has
from ..ir.program import OutputKind, Program
from ..ir.region import Island
from ..ir.roles import Phase
from ..ir.schemas import argument
from ..memory.canonicalize import to_view
from ..memory.pieces import tensors
from ..schedule.overlap import Overlap
from ..update.update_last import UpdateLast
from .form_regions import bases, is_of_tensors, separates
from .outline import Names, Outline

Choose = Callable[[Sequence[Island]], Sequence[bool]]

_FILLS = (Trait.FULL, Trait.ZEROS, Trait.ONES)
_COMPUTED = aten("mish_backward silu_backward")  # made of other ops where they have no kernel: never their operand
_RESHAPES = aten("_unsafe_view reshape")
# Kernels round a quotient down that ops take from an exact remainder: 1.0 // 0.1 is 9, not 10. The last two overflow.
_OTHERWISE = aten(
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor fmod.Tensor fmod.Scalar floor_divide "
    "floor_divide.Scalar div.Tensor_mode div.Scalar_mode acosh nextafter"
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool)


def take_all(found: Sequence[Island]) -> Sequence[bool]:
    """Each island is one."""
    return [True] * len(found)


@dataclass(frozen=True)
class FormIslands(Pass):
    """Pointwise ops, reductions, norms and views that follow each other become one island, on each side of other ops.

    All else stays where it is: matrix products, attention, collectives, random draws. An op moves up to its operand, or
    down to its first reader, if that is in the same phase and no start or wait lies between; so an island is convex,
    and lies between the starts and waits that its ops lay between. What reads the same value next to each other is one
    island, too. Ops of an update, and those that give a new value of state, stay ops, which write where state lies.
    ``ReuseMemory`` lets an island write its results into planned memory. Where fewer than ``min_ops`` ops compute, or
    more than ``max_ops``, which would compile for minutes, there is none. ``choose`` says which islands are worth it,
    the same on all ranks; the others stay ops.
    """

    min_ops: int = 2
    max_ops: int = 200
    choose: Choose = field(default=take_all, repr=False)
    numerics: ClassVar[Numerics] = "reassociates"
    after: ClassVar[tuple[type[Pass], ...]] = (WaitLate, UpdateLast, Overlap)

    def rewrite(self, program: Program) -> int:
        """Find the groups, arrange the graph by them, and outline those that are chosen; returns how many."""
        fill_vals(program)
        _show_copies(program.graph)
        runs = _Runs(program)
        groups = [group for group in runs.groups() if runs.is_worth_it(group, self.min_ops, self.max_ops)]
        names = Names(program.graph)
        islands = [Outline(group, runs.found).island(names.next(group)) for group in groups]
        chosen = self.choose(islands)
        if any(chosen):
            arrange(program.graph, runs.order())
        for group, island, is_chosen in zip(groups, islands, chosen, strict=True):
            if is_chosen:
                Outline(group, runs.found).replace(island)
        return sum(chosen)


class _Runs:
    """The run of each op that an island may hold: the number of ops outside of islands that stand before it.

    Within a run nothing else has to be computed in between, so any ops of one are a convex group.
    """

    def __init__(self, program: Program) -> None:
        graph, outputs = program.graph, zip(program.output_values(), program.outputs, strict=True)
        self._updates = {value for value, output in outputs if output.kind is OutputKind.UPDATE}
        computed = {node: frozenset({node}) for node in graph.nodes if node.target in _COMPUTED}
        self.graph, self.found = graph, storages(graph, computed)
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.inside: set[fx.Node] = set()
        self.run: dict[fx.Node, int] = {}  # of an op outside: that which it ends
        self._segments = [0]  # of each run: between which starts or waits it stands
        for node in graph.nodes:
            self._see(node)
        self._root = {node: node for node in self.inside}
        self._connect()
        self._sink()

    def groups(self) -> list[list[fx.Node]]:
        """Connected nodes within a run, each group in the order of the graph; groups in the order in which they run."""
        found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.graph.nodes:
            if node in self.inside:
                found[self._find(node)].append(node)
        return sorted(found.values(), key=lambda group: (self.run[group[0]], self.position[group[0]]))

    def order(self) -> list[fx.Node]:
        """All nodes, in an order in which those of a group stand together."""
        return sorted(self.position, key=self._key)

    def is_worth_it(self, group: list[fx.Node], least: int, most: int) -> bool:
        """Whether ``least`` to ``most`` ops of a group compute something of operands, and one is read outside."""
        here = set(group)
        computed = [node for node in group if node.all_input_nodes and not bases(node, self.found)]
        return least <= len(computed) <= most and any(not here.issuperset(node.users) for node in group)

    def _key(self, node: fx.Node) -> tuple[int, int, int]:
        if node in self.inside:
            return 2 * self.run[node], self.position[self._find(node)], self.position[node]
        return 2 * self.run[node] + (not self._is_free(node)), -1, self.position[node]

    def _see(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.run[node] = -1
        elif self._can_join(node):
            self.inside.add(node)
            self.run[node] = self._earliest(node)
        elif self._is_free(node):
            stays = not is_view(node) or not node.all_input_nodes
            self.run[node] = self._last if stays else max(map(self._after, node.all_input_nodes))
        else:
            self.run[node] = self._last
            self._segments.append(self._segments[-1] + separates(node))

    @property
    def _last(self) -> int:
        return len(self._segments) - 1

    def _is_free(self, node: fx.Node) -> bool:
        """Whether a node outside of islands takes no place between runs: a view, one of several results, a constant."""
        if not is_functional(node) or not self.inside.isdisjoint(node.all_input_nodes):
            return False
        return not node.all_input_nodes or bool(bases(node, self.found))

    def _can_join(self, node: fx.Node) -> bool:
        """Whether an island may hold ``node``, by its op, and by where its operands lie."""
        if not is_functional(node) or not is_of_tensors(node) or not all(map(_is_common, _tensors(node))):
            return False
        if node.meta.get("phase") is Phase.UPDATE or node in self._updates or _is_otherwise(node):
            return False
        if any(each.op == "placeholder" and overlaps(each.meta["val"]) for each in node.all_input_nodes):
            return False  # the next call may bring one that is not expanded
        if lies_in := bases(node, self.found):
            return self.inside.issuperset(lies_in) and len({self.run[each] for each in lies_in}) == 1
        return has(node.target, Trait.POINTWISE, Trait.FUSES, *_FILLS) or _joins_columns(node)

    def _after(self, node: fx.Node) -> int:
        """The first run in which ``node`` can be read."""
        return self.run[node] + (node not in self.inside and not self._is_free(node))

    def _earliest(self, node: fx.Node) -> int:
        """The run of the last operand, if ``node`` may move up to it; else where it stands."""
        if lies_in := bases(node, self.found):
            return self.run[lies_in[0]]
        run = max(map(self._after, node.all_input_nodes), default=self._last)
        joins = any(self.run[each] == run and _may_stand_together(node, each) for each in self._read_inside(node))
        return run if joins and self._segments[run] == self._segments[-1] else self._last

    def _read_inside(self, node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if each in self.inside]

    def _find(self, node: fx.Node) -> fx.Node:
        while self._root[node] is not node:
            node = self._root[node]
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        first, second = sorted((self._find(one), self._find(other)), key=self.position.__getitem__)
        self._root[second] = first

    def _connect(self) -> None:
        """Join ops of a run with their operands, and with others that read the same computed value."""
        readers: dict[tuple[int, fx.Node], fx.Node] = {}
        for node in self.graph.nodes:
            for each in node.all_input_nodes if node in self.inside else ():
                if each in self.inside and self.run[each] == self.run[node]:
                    self._join(each, node)
                elif each.op != "placeholder":
                    self._join(readers.setdefault((self.run[node], each), node), node)

    def _sink(self) -> None:
        """Move pointwise groups down to the run of their first reader, if that is in a group of the same phase."""
        for group in reversed(self.groups()):
            here = set(group)
            readers = [user for node in group for user in node.users if user not in here]
            first = min(map(self._time, readers), default=-1)
            joined = [each for each in readers if each in self.inside and 2 * self.run[each] == first]
            if joined and all(map(_is_pointwise, group)) and self._can_sink(group, joined):
                self.run |= dict.fromkeys(group, first // 2)
                for each in joined:
                    self._join(group[0], each)

    def _can_sink(self, group: list[fx.Node], joined: list[fx.Node]) -> bool:
        together = all(_may_stand_together(node, each) for node in group for each in joined)
        return together and self._segments[self.run[group[0]]] == self._segments[self.run[joined[0]]]

    def _time(self, node: fx.Node) -> int:
        """When a node is computed, on a scale on which a run comes right before the op that ends it."""
        if node not in self.inside and self._is_free(node):
            return min(map(self._time, node.users), default=2 * self.run[node] + 1)
        return 2 * self.run[node] + (node not in self.inside)


def _is_pointwise(node: fx.Node) -> bool:
    return has(node.target, Trait.POINTWISE, *_FILLS) or is_view(node) or _joins_columns(node)


def _is_otherwise(node: fx.Node) -> bool:
    """Whether kernels compute another number than an op: not of integers, which they divide exactly.

    But a kernel that drops the rest of a quotient of integers ends the process where the divisor is zero: ops raise.
    """
    if node.target not in _OTHERWISE:
        return False
    return node.meta["val"].dtype.is_floating_point or node.kwargs.get("rounding_mode") == "trunc"


def _joins_columns(node: fx.Node) -> bool:
    """Whether a node concatenates along another dim than the first, so that parts have to be copied."""
    if node.target is not torch.ops.aten.cat.default:
        return False
    dim: Any = argument(node, "dim") or 0
    return bool(dim % node.meta["val"].ndim)


def _show_copies(graph: fx.Graph) -> None:
    """Write reshapes as views, of a clone where they copy: an island can hold the clone."""
    layouts = Layouts(graph)
    for node in graph.nodes:
        if node.target in _RESHAPES:
            to_view(node, layouts)


def _may_stand_together(node: fx.Node, other: fx.Node) -> bool:
    """Whether two ops may run next to each other: else values of forward would live longer, or be kept twice."""
    repeats = [each.meta.get("recompute_of") is not None for each in (node, other)]
    return node.meta.get("phase") is other.meta.get("phase") and repeats[0] == repeats[1]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [val for each in (node, *node.all_input_nodes) for val in tensors(each.meta["val"])]


def _is_common(val: Any) -> bool:
    return val.dtype in _DTYPES and not val.is_conj() and not val.is_neg()
