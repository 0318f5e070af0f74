"""Reachability in a graph: the nodes that others are computed from, and those that are computed from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx


def reached(start: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> dict[fx.Node, None]:
    """``start`` and all nodes that ``onward`` leads to, in the order in which it does."""
    found, pending = dict[fx.Node, None](), list(start)
    while pending:
        node = pending.pop()
        if node not in found:
            found[node] = None
            pending += onward(node)
    return found


def arguments_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that are its arguments."""
    return node.all_input_nodes


def ancestors(found: Iterable[fx.Node], reads: Callable[[fx.Node], Iterable[fx.Node]] = arguments_of) -> set[fx.Node]:
    """``found`` and all nodes that one of them depends on, where a node ``reads`` others."""
    return set(reached(found, reads))


def descendants(nodes: Iterable[fx.Node], found: set[fx.Node]) -> set[fx.Node]:
    """``found`` and those of ``nodes``, in topological order, that depend on one of them."""
    after = set(found)
    for node in nodes:
        if any(needed in after for needed in node.all_input_nodes):
            after.add(node)
    return after


def ancestors_among(graph: fx.Graph, candidates: Sequence[fx.Node]) -> list[int]:
    """For each candidate, the candidates that it depends on, as an int with one bit for each."""
    number = {node: k for k, node in enumerate(candidates)}
    needs: dict[fx.Node, int] = {}
    for node in graph.nodes:
        needs[node] = 0
        for argument in node.all_input_nodes:
            needs[node] |= needs[argument] | (1 << number[argument] if argument in number else 0)
    return [needs[node] for node in candidates]
