"""``Region``: a functional subgraph that a program calls as one node, so that a backend can take it as a whole.

The node is a ``call_function`` of the region. It returns a tuple, of which ``getitem`` takes each result; a result has
memory of its own, as an op's has. The inside has no collective, no random draw and no write, and knows nothing of
arenas, placements or inputs of the program: tensors in, tensors out. A region is never edited: make another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .._torch import LazyGraphModule


class Region:
    """A function of tensors, by its graph: a placeholder for each operand, and a tuple of tensors for the results."""

    def __init__(self, name: str, graph: fx.Graph) -> None:
        self.name = self.__name__ = self.__qualname__ = name  # by which torch.fx writes a function
        self.graph = graph
        self.module: fx.GraphModule = LazyGraphModule(torch.nn.Module(), graph)

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        """The results, computed op by op."""
        returned: tuple[Any, ...] = self.module(*operands)
        return returned

    def __repr__(self) -> str:
        return self.name

    @property
    def placeholders(self) -> list[fx.Node]:
        """The placeholders, one for each operand."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes whose values are returned."""
        returned: Any = self.graph.output_node().args[0]
        return tuple(returned)

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that compute something."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]


def region_of(node: Any) -> Region | None:
    """The region that ``node`` calls; None if it calls something else, or is no node."""
    target = getattr(node, "target", None)
    return target if isinstance(target, Region) else None


def regions(graph: fx.Graph) -> dict[fx.Node, Region]:
    """The nodes that call a region, in order, each with its region."""
    return {node: node.target for node in graph.nodes if isinstance(node.target, Region)}


def every_node(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph; in the place of a call of a region, the nodes inside that compute something."""
    for node in graph.nodes:
        region = region_of(node)
        yield from [node] if region is None else region.nodes
