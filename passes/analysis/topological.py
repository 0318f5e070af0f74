"""Put the nodes of a graph into another order, so that every node still follows what it reads.

The new order follows from the graph's structure alone: never from sizes, which may differ from rank to rank. So all
ranks issue their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

from torch import fx


def settle(graph: fx.Graph, late: Collection[fx.Node] = ()) -> None:
    """Bring ``graph`` into topological order, else leaving nodes where they stand.

    A node that reads what stands further down pulls that up. The nodes in ``late`` are put right before the first
    node that needs them.
    """
    before = list(graph.nodes)
    position = {node: k for k, node in enumerate(before)}
    done: dict[fx.Node, None] = {}
    for node in before[:-1]:
        if node not in late:
            _emit(node, position, done)
    for node in before:
        _emit(node, position, done)
    arrange(graph, done)


def arrange(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Give the nodes this order."""
    nodes = list(order)
    assert len(nodes) == len(graph.nodes), "every node once"
    for previous, node in pairwise(nodes):
        if previous.next is not node:
            previous.append(node)


def positions(graph: fx.Graph, moving: Collection[fx.Node]) -> dict[fx.Node, int]:
    """For each moving node, how many of the others stand before it. What differs afterwards has moved."""
    passed, found = 0, {}
    for node in graph.nodes:
        if node in moving:
            found[node] = passed
        else:
            passed += 1
    return found


def _emit(node: fx.Node, position: dict[fx.Node, int], done: dict[fx.Node, None]) -> None:
    """Add ``node`` to ``done``, after everything it needs."""
    stack, open_nodes = [node], set[fx.Node]()
    while stack:
        top = stack[-1]
        missing = [] if top in done else [needed for needed in top.all_input_nodes if needed not in done]
        if not missing:
            done.setdefault(stack.pop())
            continue
        assert top not in open_nodes, f"{top} depends on itself"
        open_nodes.add(top)
        stack += sorted(missing, key=position.__getitem__, reverse=True)
