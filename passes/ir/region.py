"""``Region``: a functional subgraph that a program calls as one node, so that a backend can take it as a whole.

The node is a ``call_function`` of the region. It returns a tuple, of which ``getitem`` takes each result; a result has
memory of its own, as an op's has. The inside has no collective, no random draw and no write, and knows nothing of
arenas, placements or inputs of the program: tensors in, tensors out. A region is never edited: make another one.

An ``Island`` is a region that can write its results into memory that it is given. It does so once memory is planned:
then its last operands are that memory, and its last ops copy the results there.
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


class Island(Region):
    """A region of pointwise ops, reductions and views, to be one kernel or a few."""

    @property
    def outs(self) -> list[fx.Node]:
        """The placeholders of the memory that it writes to, one for each result; none before memory is planned."""
        return [each.args[0] for each in self.results if each.target is copy_]  # type: ignore[misc]

    def with_outs(self) -> Island:
        """The same island, which takes memory for each result behind its operands, and returns what it wrote there."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.placeholders:
            env[node] = graph.node_copy(node)
        outs = [graph.placeholder(f"{node.name}_memory") for node in self.results]
        for node in self.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        copies = [
            graph.create_node("call_function", copy_, (out, env[each]), name=f"{each.name}_written")
            for out, each in zip(outs, self.results, strict=True)
        ]
        for node, result in zip([*outs, *copies], self.results * 2, strict=True):
            node.meta = {"val": result.meta["val"]}
        graph.output(tuple(copies))
        return Island(self.name, graph)

    def functional(self) -> fx.Graph:
        """The graph without memory for results, and without the copies there."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        copied: dict[fx.Node, Any] = {each: each.args[1] for each in self.results if each.target is copy_}
        left_out = {*self.outs, *copied}
        for node in [*self.placeholders, *self.nodes]:
            if node not in left_out:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[copied.get(each, each)] for each in self.results))
        return graph


copy_ = torch.ops.aten.copy_.default


def island_of(node: Any) -> Island | None:
    """The island that ``node`` calls; None if it calls something else, or is no node."""
    target = getattr(node, "target", None)
    return target if isinstance(target, Island) else None


def region_of(node: Any) -> Region | None:
    """The region that ``node`` calls; None if it calls something else, or is no node."""
    target = getattr(node, "target", None)
    return target if isinstance(target, Region) else None


def regions(graph: fx.Graph) -> dict[fx.Node, Region]:
    """The nodes that call a region, in order, each with its region."""
    return {node: node.target for node in graph.nodes if isinstance(node.target, Region)}


def islands(graph: fx.Graph) -> dict[fx.Node, Island]:
    """The nodes that call an island, in order, each with its island."""
    return {node: node.target for node in graph.nodes if isinstance(node.target, Island)}


def every_node(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph; in the place of a call of a region, the nodes inside that compute something."""
    for node in graph.nodes:
        region = region_of(node)
        yield from [node] if region is None else region.nodes
