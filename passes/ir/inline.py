"""Put the ops of regions in the place of their calls, for analyses of each op of a program by itself."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from .program import Program
from .region import Region, region_of, regions


def inlined(program: Program) -> Program:
    """``program`` with the ops of its regions in the place of their calls: the same values under the same names."""
    if not regions(program.graph):
        return program
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    for node in program.graph.nodes:
        if (region := region_of(node)) is not None:
            env[node] = _copy_inside(graph, region, [env[each] for each in node.args])
        elif node.target is operator.getitem and isinstance(env[node.args[0]], tuple):
            env[node] = env[node.args[0]][node.args[1]]
        elif node.op != "output":
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(fx.map_arg(program.output_node.args[0], env.__getitem__))
    return program.with_graph(graph, program.inputs, program.outputs)


def _copy_inside(graph: fx.Graph, region: Region, operands: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Copy what a region computes into ``graph``; returns its results there."""
    env = dict(zip(region.placeholders, operands, strict=True))
    for node in region.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return tuple(env[result] for result in region.results)
