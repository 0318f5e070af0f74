"""Compute equal things once, collectives included (common subexpression elimination)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..analysis.aliases import escaping, storages
from ..base import Pass
from ..ir.collectives import Collective, is_collective
from ..ir.edit import insert_before
from ..ir.effects import is_pure
from ..ir.meta import Relation
from ..ir.program import Program
from ..ir.roles import Role


@dataclass(frozen=True)
class MergeEqual(Pass):
    """Of pure nodes with equal op and arguments, the first serves all readers.

    What was recomputed on purpose (``meta["recompute_of"]``) is never merged with what it recomputes, and random ops
    are not pure. Outputs do not come to share memory: where the memory of both nodes lives on after the call, what
    returns the second gets a ``clone`` of the first. Assumes a functional graph; leaves the equal nodes erased.
    """

    def rewrite(self, program: Program) -> int:
        """Visit nodes in order: the arguments of a node are merged before it."""
        memory = _Escapes(program.graph)
        first: dict[Hashable, fx.Node] = {}
        edits = 0
        for node in list(program.graph.nodes):
            if is_pure(node):
                original = first.setdefault(_key(node), node)
                edits += original is not node and _merge(node, original, memory)
        return edits


class _Escapes:
    """The memory that lives on after the call, kept up to date while nodes are merged."""

    def __init__(self, graph: fx.Graph) -> None:
        self.found = storages(graph)
        self.kept = escaping(graph, self.found)
        self.became: dict[fx.Node, fx.Node] = {}

    def kept_of(self, node: fx.Node) -> set[fx.Node]:
        """The pieces of memory of ``node`` that live on."""
        return {storage for each in self.found[node] if (storage := self.became.get(each, each)) in self.kept}

    def merge(self, node: fx.Node, original: fx.Node) -> None:
        """Values in the memory of ``node`` now lie in that of ``original``, and keep it alive where they lived on."""
        if self.kept_of(node):
            self.kept |= {self.became.get(each, each) for each in self.found[original]}
        if node in self.found[node] and original in self.found[original]:
            self.became[node] = original


def _merge(node: fx.Node, original: fx.Node, memory: _Escapes) -> bool:
    mine, other = memory.kept_of(node), memory.kept_of(original)
    if is_collective(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        node.replace_all_uses_with(original)  # outputs are waits and items, which are visited later
    elif not mine or not other or mine == other:
        memory.merge(node, original)
        node.replace_all_uses_with(original)
    elif node.target is torch.ops.aten.clone.default:
        return False  # it would be replaced by itself
    else:
        _clone(node, original, memory)
    _join_meta(original, node)
    node.graph.erase_node(node)
    return True


def _clone(node: fx.Node, original: fx.Node, memory: _Escapes) -> None:
    """Outputs, and views that are outputs, read a clone; all other readers read the first node."""
    node.replace_all_uses_with(
        original, lambda user: user.op != "output" and not memory.found[user] & memory.found[node]
    )
    clone, val = torch.ops.aten.clone.default, node.meta["val"]
    copy = insert_before(node, clone, original, like=node, relation=Relation.REPLACEMENT, val=val)
    memory.found[copy] = memory.found[node]
    node.replace_all_uses_with(copy)


def _join_meta(original: fx.Node, node: fx.Node) -> None:
    """One collective now serves what two served."""
    first, second = original.meta.get("collective"), node.meta.get("collective")
    if isinstance(first, Collective) and isinstance(second, Collective):
        role = second.role if first.role is Role.UNKNOWN else first.role
        original.meta["collective"] = replace(first, role=role, of=tuple(dict.fromkeys(first.of + second.of)))


def _key(node: fx.Node) -> Hashable:
    """Equal for nodes that compute the same on all ranks, not just on one whose numbers happen to be equal."""
    known = tuple(str(node.meta.get(key)) for key in ("recompute_of", "placement", "uneven", "numbers"))
    return node.op, node.target, _frozen(node.args), _frozen(dict(node.kwargs)), *known


def _frozen(value: Any) -> Hashable:
    """``value`` as a key to look up, with types: to Python 1, 1.0 and True are equal."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", _frozen((value.start, value.stop, value.step))
    return type(value), repr(value) if isinstance(value, float) else value
