"""Compute all parts of a rank in one program, where a part needs sums over all of them, such as batch statistics.

The share of one part is written once for each part, with ops of the same sizes; a sum over parts becomes a balanced
tree of additions, the same as that of accumulators, and what follows from sums alone is computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate

from passes import Program, Role
from passes.ir.collectives import group_of, is_collective, is_wait
from passes.ir.schemas import name_of
from passes.runtime.random import draw

from .._torch import LazyGraphModule
from .accumulate import RUN, TIME, check_sums

aten = torch.ops.aten
_ARITHMETIC = (operator.add, operator.mul)  # of the number of a run, where a draw begins
_OF_ALL = ("placement", "captured", "grad_of")  # what is known of a value of all parts, and not of that of one


def side_by_side(program: Program, rows: Mapping[str, int], joined: Mapping[str, int], count: int) -> Program:
    """The share of one of ``count`` parts, which follows a run, as a program of all; ``joined``: results with rows."""
    writer = _Writer(program, rows, count)
    for node in program.graph.nodes:
        if node.op != "output":
            writer.write(node)
    values = [
        writer.joined(value, joined[output.name]) if output.name in joined else writer.copies[value][0]
        for value, output in zip(program.output_values(), program.outputs, strict=True)
    ]
    writer.graph.output(tuple(values))
    inputs = [each for each in program.inputs if each.role is not Role.RUN]
    found = replace(program, graph_module=LazyGraphModule(torch.nn.Module(), writer.graph), inputs=inputs)
    check_sums(found, writer.totals)
    return found


@dataclass
class _Writer:
    """Writes the graph; ``copies``: by node, its value in each part, the same one where parts share it."""

    program: Program
    rows: Mapping[str, int]
    count: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, list[Any]] = field(default_factory=dict)
    totals: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._declared = dict(zip(self.program.placeholders, self.program.inputs, strict=True))

    def write(self, node: fx.Node) -> None:
        """Write a node for each part, or once for all."""
        if node.op == "placeholder":
            self.copies[node] = self._input(node)
        elif is_collective(node) and group_of(node) == TIME:
            (value,) = node.all_input_nodes
            self.copies[node] = [self._sum(self.copies[value], next(iter(node.users)))] * self.count
            self.totals.add(self.copies[node][0])
        elif is_wait(node) and self.totals.issuperset(self.copies[node.all_input_nodes[0]]):
            self.copies[node] = self.copies[node.all_input_nodes[0]]
        elif any(each is not self.copies[read][0] for read in node.all_input_nodes for each in self.copies[read]):
            self.copies[node] = [self._copy(node, k) for k in range(self.count)]
        else:
            self.copies[node] = [self._copy(node, 0)] * self.count

    def joined(self, value: fx.Node, dim: int) -> fx.Node:
        """The rows of all parts, one after the other."""
        values = self.copies[value]
        whole = torch.cat([each.meta["val"] for each in values], dim)
        return self._call(aten.cat.default, (values, dim), whole, value)

    def _input(self, node: fx.Node) -> list[Any]:
        declared = self._declared[node]
        if declared.name == RUN:
            return list(range(self.count))
        new = self.graph.node_copy(node)
        if declared.role not in (Role.BATCH, Role.ARGUMENT) or not isinstance(node.meta["val"], torch.Tensor):
            return [new] * self.count
        if declared.name not in self.rows:
            return [self._own(new, new.meta["val"], node)] * self.count
        val, dim = node.meta["val"], self.rows[declared.name]
        length = val.shape[dim]
        new.meta["val"] = torch.cat([val] * self.count, dim)
        bounds = [(k * length, (k + 1) * length) for k in range(self.count)]
        return [self._own(self._call(aten.slice.Tensor, (new, dim, *each), val, node), val, node) for each in bounds]

    def _own(self, value: fx.Node, val: torch.Tensor, like: fx.Node) -> fx.Node:
        """A copy, which begins where kernels expect it (``Program.same_bits``)."""
        return self._call(aten.clone.default, (value,), val.clone(memory_format=torch.contiguous_format), like)

    def _sum(self, values: Sequence[fx.Node], like: fx.Node) -> fx.Node:
        """A balanced tree over the parts."""
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [self._call(aten.add.Tensor, pair, like.meta["val"], like) for pair in pairs]
        values[0].meta |= {key: like.meta[key] for key in _OF_ALL if key in like.meta}
        return values[0]

    def _copy(self, node: fx.Node, k: int) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: self.copies[each][k])
        if node.target in _ARITHMETIC and all(isinstance(each, int) for each in args):
            return node.target(*args)
        new = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        placement = node.meta.get("placement")
        # What is drawn ``spmd.verify`` puts together, and lets the captured program draw the same.
        is_drawn = any(each.target is draw for each in (node, *node.all_input_nodes))
        if not placement or not (placement[-1] == Replicate() or (is_drawn and placement[-1].is_shard())):
            for key in _OF_ALL:
                new.meta.pop(key, None)
        return new

    def _call(self, op: Any, args: tuple[Any, ...], val: torch.Tensor, like: fx.Node) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, {}, name=name_of(op))
        node.meta = {key: value for key, value in like.meta.items() if key not in _OF_ALL} | {"val": val}
        return node
