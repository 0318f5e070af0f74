"""Merge what activation checkpointing computes again with what computed it before, in a copy of the graph.

Backward may read both: a custom op that keeps integers on ``ctx`` reads where the first run's rows end, and the rows of
the second. An analysis of the copy sees that these are the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from passes.analysis.structural_keys import text_of
from passes.ir.effects import is_pure
from passes.ir.schemas import name_of

_PASSES_ON = {"detach", "alias"}


def originals(order: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """By recomputed node: the first one that computes the same; a node that none is equal to has no entry."""
    found, by_key = dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    names = dict[fx.Node, str]()  # equal for equal values
    if not any("recompute_of" in node.meta for node in order):
        return found
    for node in order:
        names[node] = node.name
        if node.op != "call_function":
            continue
        if name_of(node.target) in _PASSES_ON and isinstance(node.args[0], fx.Node):
            names[node] = names[node.args[0]]
            continue
        drawn = node.meta.get("draw")  # equal draws have one number
        key = f"{node.target} {text_of(node.args, names)} {text_of(dict(node.kwargs), names)} {drawn}"
        if is_pure(node) or drawn is not None:
            first = by_key.setdefault(key, node)
            names[node] = first.name
            found |= {node: first} if first is not node and "recompute_of" in node.meta else {}
    return found


def merged(order: Sequence[fx.Node], first: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """By node: its copy, or that of its original in ``first``, in a graph in which the copies of originals are read."""
    if not first:
        return {node: node for node in order}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in order:
        copies[node] = copies[first[node]] if node in first else graph.node_copy(node, copies.__getitem__)
    return copies
