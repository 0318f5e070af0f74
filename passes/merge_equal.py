"""Compute equal things once, collectives included (common subexpression elimination)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .aliases import Storages, escaping, storages
from .base import Pass
from .collectives import Collective
from .program import Program
from .purity import is_pure
from .roles import Role


@dataclass(frozen=True)
class MergeEqual(Pass):
    """Of pure nodes with equal op and arguments, the first serves all readers.

    What was recomputed on purpose (``meta["recompute_of"]``) is never merged with what it recomputes, and random ops
    are not pure. Outputs do not come to share memory: where the memory of both nodes lives on after the call, the
    second becomes a ``clone`` of the first. Assumes a functional graph; leaves the equal nodes erased.
    """

    def rewrite(self, program: Program) -> int:
        """Visit nodes in order: when a node's turn comes, its arguments are merged already."""
        found = storages(program.graph)
        kept = escaping(program.graph, found)
        first: dict[Hashable, fx.Node] = {}
        edits = 0
        for node in list(program.graph.nodes):
            if not is_pure(node):
                continue
            original = first.setdefault(_key(node), node)
            if original is not node:
                edits += _merge(node, original, found, kept)
        return edits


def _merge(node: fx.Node, original: fx.Node, found: dict[fx.Node, Storages], kept: set[fx.Node]) -> int:
    if _would_share(node, original, found, kept):
        if node.target is torch.ops.aten.clone.default:
            return 0
        _clone_for_readers(node, original)
    else:
        node.replace_all_uses_with(original)
    _join_meta(original, node)
    node.graph.erase_node(node)
    return 1


def _would_share(node: fx.Node, original: fx.Node, found: dict[fx.Node, Storages], kept: set[fx.Node]) -> bool:
    """Whether two pieces of memory that both live on would become one."""
    mine, other = found[node] & kept, found[original] & kept
    return bool(mine) and bool(other) and mine != other


def _clone_for_readers(node: fx.Node, original: fx.Node) -> None:
    """Readers inside the graph take the first; what is returned gets memory of its own."""
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (original,))
    copy.meta = {key: value for key, value in node.meta.items() if key != "collective"}
    node.replace_all_uses_with(copy)


def _join_meta(original: fx.Node, node: fx.Node) -> None:
    """One collective now serves what two served."""
    said, also = original.meta.get("collective"), node.meta.get("collective")
    if isinstance(said, Collective) and isinstance(also, Collective):
        role = also.role if said.role is Role.UNKNOWN else said.role
        original.meta["collective"] = replace(said, role=role, of=tuple(dict.fromkeys(said.of + also.of)))


def _key(node: fx.Node) -> Hashable:
    """Equal for nodes that compute the same."""
    return node.op, node.target, _frozen(node.args), _frozen(dict(node.kwargs)), str(node.meta.get("recompute_of"))


def _frozen(value: Any) -> Hashable:
    """``value`` as something to look up, with types: to Python 1, 1.0 and True are equal."""
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", _frozen((value.start, value.stop, value.step))
    return type(value), repr(value) if isinstance(value, float) else value
