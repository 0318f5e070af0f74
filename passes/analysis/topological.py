"""Put the nodes of a graph into another order, so that every node still follows what it reads.

The new order follows from the graph's structure alone: never from sizes, which may differ from rank to rank. So all
ranks issue their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from torch import fx


def settle(graph: fx.Graph, late: Collection[fx.Node] = ()) -> None:
    """Bring ``graph`` into topological order, else leaving nodes where they stand.

    A node that reads what stands further down pulls that up. The nodes in ``late`` are put right before the first
    node that needs them.
    """
    before = list(graph.nodes)
    position, needed = {node: k for k, node in enumerate(before)}, {node: node.all_input_nodes for node in before}
    done: dict[fx.Node, None] = {}
    for node in before[:-1]:
        if node not in late:
            emit(node, needed, position, done)
    for node in before:
        emit(node, needed, position, done)
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


def emit(
    node: fx.Node,
    needed: Mapping[fx.Node, Iterable[fx.Node]],
    position: Mapping[fx.Node, int],
    done: dict[fx.Node, None],
) -> None:
    """Add ``node`` to ``done``, after everything it needs."""
    stack, open_nodes = [node], set[fx.Node]()
    while stack:
        top = stack[-1]
        missing = [] if top in done else [each for each in needed[top] if each not in done]
        if not missing:
            done.setdefault(stack.pop())
            continue
        assert top not in open_nodes, f"{top} depends on itself"
        open_nodes.add(top)
        stack += sorted(missing, key=position.__getitem__, reverse=True)
