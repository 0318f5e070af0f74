"""Which writes of a graph are renamings: what an op writes is a new value, which all later readers read.

A write is a renaming where no view of the memory is read afterwards. Optimizers write so: whole parameters, whole
averages. Their graphs are functional once each write is replaced by the op that returns the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from passes.ir.ops import Trait, aten, find, has, in_place_variant
from passes.ir.schemas import schema

from ..._torch import OpOverload
from ...memo import Shapes


@dataclass
class RenamedWrites:
    """``written``: for each node that is the result of a write, the node whose value it takes the place of."""

    written: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _viewed: dict[fx.Node, fx.Node] = field(default_factory=dict)  # by view: whose memory it lies in
    _views: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # the reverse

    @classmethod
    def of(cls, graph: fx.Graph, shapes: Shapes) -> RenamedWrites | None:
        """The writes of ``graph``; None if one is more than a renaming, or may be."""
        found, last_reads = cls(), _last_reads(graph)
        for k, node in enumerate(graph.nodes):
            if node.op not in ("call_function", "placeholder", "get_attr", "output") or _has_symbolic_shape(node):
                return None
            if node.op == "call_function" and not found._note(node, k, last_reads, shapes):
                return None
        return found

    def value_of(self, node: fx.Node) -> fx.Node:
        """The node under which the value that ``node`` refers to is kept."""
        return self.written.get(node, node)

    def _note(self, node: fx.Node, k: int, last_reads: dict[fx.Node, int], shapes: Shapes) -> bool:
        """Note what a call writes, or views; returns whether the writes so far are renamings."""
        if has(node.target, Trait.MUTABLE):
            return self._write(node, k, last_reads, shapes)
        if has(node.target, Trait.COMPOSITE):
            return False  # its result may be a view
        if has(node.target, Trait.ALIAS, Trait.UNDECLARED_VIEW):
            return self._view(node)
        return True

    def _view(self, node: fx.Node) -> bool:
        viewed = node.args[0]
        if not isinstance(viewed, fx.Node) or not _views_only_the_first(node.target):
            return False
        if node.target is getitem and viewed not in self._viewed:
            return True  # one of several results, which have memory of their own
        owner = self._viewed.get(viewed, self.value_of(viewed))
        self._viewed[node] = owner
        self._views.setdefault(owner, []).append(node)
        return True

    def _write(self, node: fx.Node, k: int, last_reads: dict[fx.Node, int], shapes: Shapes) -> bool:
        written: Any = node.target
        op, target = functional_variant(written), node.args[0]
        if op is None or not isinstance(target, fx.Node) or target in self._viewed:
            return False
        owner = self.value_of(target)
        if owner.op == "get_attr":
            return False
        if any(last_reads.get(view, -1) >= k for view in self._views.get(owner, ())):
            return False
        self.written[node] = owner
        old, new = target.meta["val"], shapes.of(op, node.args, node.kwargs)
        return bool(old.dtype == new.dtype and old.shape == new.shape)


_FILLS = aten("copy fill.Scalar fill.Tensor zero")


def functional_variant(op: OpOverload) -> OpOverload | None:
    """The op that returns what ``op`` writes to each element of its first argument; None if there is none."""
    declared = schema(op)
    if op.namespace != "aten" or not declared.name.endswith("_") or declared.written != [0]:
        return None
    found = find(f"{declared.name[:-1]}.{declared.overload}")
    if found is None or in_place_variant(found) is not op:
        return None
    return found if found in _FILLS or torch.Tag.pointwise in found.tags else None


def _views_only_the_first(op: Any) -> bool:
    """Whether no other argument than the first can lie in the same memory as the result."""
    return not isinstance(op, OpOverload) or not any(argument.shared for argument in schema(op).arguments[1:])


def _has_symbolic_shape(node: fx.Node) -> bool:
    """Whether the shape of a value, or of one of several, is not known."""
    val = node.meta.get("val")
    vals = val if isinstance(val, (tuple, list)) else [val]
    return any(isinstance(size, torch.SymInt) for each in vals if isinstance(each, torch.Tensor) for size in each.shape)


def _last_reads(graph: fx.Graph) -> dict[fx.Node, int]:
    """The position of the last reader of each node."""
    return dict(_reads(graph))


def _reads(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    for k, node in enumerate(graph.nodes):
        yield from ((operand, k) for operand in node.all_input_nodes)
