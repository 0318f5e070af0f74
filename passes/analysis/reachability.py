"""Reachability in a graph: the nodes that others are computed from, and those that are computed from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx


def ancestors(found: Iterable[fx.Node]) -> set[fx.Node]:
    """``found`` and all nodes that one of them depends on."""
    reached: set[fx.Node] = set()
    pending = list(found)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += node.all_input_nodes
    return reached


def descendants(nodes: Iterable[fx.Node], found: set[fx.Node]) -> set[fx.Node]:
    """``found`` and those of ``nodes``, in topological order, that depend on one of them."""
    reached = set(found)
    for node in nodes:
        if any(needed in reached for needed in node.all_input_nodes):
            reached.add(node)
    return reached


def ancestors_among(graph: fx.Graph, candidates: Sequence[fx.Node]) -> list[int]:
    """For each candidate, the candidates that it depends on, as an int with one bit for each."""
    number = {node: k for k, node in enumerate(candidates)}
    needs: dict[fx.Node, int] = {}
    for node in graph.nodes:
        needs[node] = 0
        for argument in node.all_input_nodes:
            needs[node] |= needs[argument] | (1 << number[argument] if argument in number else 0)
    return [needs[node] for node in candidates]
