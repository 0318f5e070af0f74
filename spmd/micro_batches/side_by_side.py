"""Compute all parts of a rank in one program, where a part needs sums over all of them, such as batch statistics.

The share of one part is written once for each part, with ops of the same sizes; a sum over parts becomes a balanced
tree of additions, the same as that of accumulators, and what follows from sums alone is computed once. Along an axis of
more than two ranks, these exchange what they have of each part, and each adds up all. All compute as many parts, for
equal programs: a rank that has fewer of its own computes one of the next rank's, too. Where no part needs sums of
others, a program may be that of a few parts, whose sums are left pending over the runs of the others.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Replicate, Shard

from passes import Axis, Collective, Kind, Output, Program, Role
from passes.ir.collectives import WAIT, c10d, group_of, is_collective, is_wait
from passes.ir.micro_batches import RUN_NUMBER
from passes.ir.schemas import name_of
from passes.runtime.random import draw

from .._torch import LazyGraphModule
from ..placements import chunk
from .accumulate import TIME, check_sums
from .follow_the_run import RUN

aten = torch.ops.aten
_ARITHMETIC = (operator.add, operator.mul)  # of the number of a run, where a draw begins
_OF_ALL = ("placement", "captured", "grad_of")  # what is known of a value of all parts, and not of that of one


def side_by_side(
    program: Program,
    rows: Mapping[str, int],
    joined: Mapping[str, int],
    count: int,
    over: Axis | None = None,
    in_runs: bool = False,
) -> Program:
    """The share of one of ``count`` parts, which follows a run, as a program of all; ``joined``: results with rows.

    ``over``: the axis along which ranks divide the parts; else they are those of this rank. ``in_runs``: the program
    runs for other parts, too, so that its sums are still to be added up over runs.
    """
    parts = [_parts(count, over.size, rank) for rank in range(over.size)] if over is not None else [list(range(count))]
    writer = _Writer(program, rows, count, parts, over, in_runs)
    for node in program.graph.nodes:
        if node.op != "output":
            writer.write(node)
    values = [
        writer.joined(value, joined[output.name]) if output.name in joined else writer.copies[value][0]
        for value, output in zip(program.output_values(), program.outputs, strict=True)
    ]
    writer.graph.output(tuple(values))
    inputs = [each for each in program.inputs if in_runs or each.role is not RUN_NUMBER]
    outputs = [writer.declared(each, joined.get(each.name)) for each in program.outputs]
    graph_module = LazyGraphModule(torch.nn.Module(), writer.graph)
    found = replace(program, graph_module=graph_module, inputs=inputs, outputs=outputs)
    if not in_runs:
        check_sums(found, writer.totals)
    return found


def _parts(count: int, ranks: int, rank: int) -> list[int]:
    """The parts of a rank, as many as of any other."""
    most = -(-count // ranks)
    first = min(rank * count // ranks, count - most)
    return list(range(first, first + most))


@dataclass
class _Writer:
    """Writes the graph; ``copies``: by node, its value in each part, the same one where parts share it.

    ``parts``: those of each rank along ``over``.
    """

    program: Program
    rows: Mapping[str, int]
    count: int
    parts: Sequence[Sequence[int]]
    over: Axis | None
    in_runs: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, list[Any]] = field(default_factory=dict)
    totals: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._declared = dict(zip(self.program.placeholders, self.program.inputs, strict=True))
        self.own = self.parts[0 if self.over is None else self.over.coordinate]

    def write(self, node: fx.Node) -> None:
        """Write a node for each part, or once for all."""
        if node.op == "placeholder":
            self.copies[node] = self._input(node)
        elif is_collective(node) and group_of(node) == TIME:
            self.copies[node] = [self._total(node)] * len(self.own)
        elif is_wait(node) and self.totals.issuperset(self.copies[node.all_input_nodes[0]]):
            self.copies[node] = self.copies[node.all_input_nodes[0]]
        elif any(each is not self.copies[read][0] for read in node.all_input_nodes for each in self.copies[read]):
            self.copies[node] = [self._copy(node, k) for k in range(len(self.own))]
        else:
            self.copies[node] = [self._copy(node, 0)] * len(self.own)

    def joined(self, value: fx.Node, dim: int) -> fx.Node:
        """The rows of all parts, one after the other."""
        values = list(self._of_all_parts(self.copies[value], value))
        whole = torch.cat([each.meta["val"] for each in values], dim)
        found = self._call(aten.cat.default, (values, dim), whole, value)
        if self.over is None:
            return found
        start, length = chunk(whole.shape[dim], self.over.size, self.over.coordinate)
        own = self._applied(aten.slice.Tensor, found, [dim, start, start + length], {}, value)
        return self._contiguous(own, value)

    def declared(self, output: Output, dim: int | None) -> Output:
        """An output, of which ranks along the axis have their rows."""
        if dim is None or self.over is None:
            return output
        names = [axis.name for axis in self.program.mesh.axes]
        placement = list(output.placement)
        placement[names.index(self.over.name)] = Shard(dim)
        return replace(output, placement=tuple(placement))

    def _input(self, node: fx.Node) -> list[Any]:
        declared = self._declared[node]
        if declared.name == RUN and not self.in_runs:
            return list(self.own)
        new = self.graph.node_copy(node)
        if declared.name == RUN:
            return [self._part_of_run(new, k) for k in self.own]
        if declared.role not in (Role.BATCH, Role.ARGUMENT) or not isinstance(node.meta["val"], torch.Tensor):
            return [new] * len(self.own)
        if declared.name not in self.rows:
            return [self._applied(aten.clone.default, new, [], {}, node)] * len(self.own)
        val, dim = node.meta["val"], self.rows[declared.name]
        whole = torch.cat([val] * self.count, dim)
        new.meta["val"] = whole
        if self.over is not None:
            start, length = chunk(whole.shape[dim], self.over.size, self.over.coordinate)
            new.meta["val"] = whole.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
            new = self._all_rows(new, whole, dim, node)
        return [self._rows(new, dim, k, node) for k in self.own]

    def _part_of_run(self, run: fx.Node, k: int) -> fx.Node:
        """The number of the part that is the ``k``-th of a run, of all parts of the rank."""
        first = self.graph.call_function(operator.mul, (run, len(self.own)))
        number = self.graph.call_function(operator.add, (first, k))
        for node in (first, number):
            node.meta = dict(run.meta)
        return number

    def _rows(self, whole: fx.Node, dim: int, k: int, like: fx.Node) -> fx.Node:
        """The rows of part ``k``: a copy, which begins where kernels expect it (``Program.same_bits``)."""
        length = like.meta["val"].shape[dim]
        part = self._applied(aten.slice.Tensor, whole, [dim, k * length, (k + 1) * length], {}, like)
        return self._contiguous(part, like)

    def _all_rows(self, own: fx.Node, whole: torch.Tensor, dim: int, like: fx.Node) -> fx.Node:
        """The rows of all ranks along the axis, which have as many as ``torch.chunk`` gives them."""
        assert self.over is not None
        dtype, rows = whole.dtype, whole.shape[dim]
        own = self._applied(aten.transpose.int, own, [0, dim], {}, like)
        if dtype is torch.bool:  # not all backends gather bools
            own = self._applied(aten._to_copy.default, own, [], {"dtype": torch.uint8}, like)
        missing = -(-rows // self.over.size) - own.meta["val"].shape[0]
        pad = [*[0, 0] * (whole.ndim - 1), 0, missing]
        own = self._applied(aten.constant_pad_nd.default, own, [pad], {}, like)
        found = self._applied(aten.slice.Tensor, self._gathered(own, like), [0, 0, rows], {}, like)
        if dtype is torch.bool:
            found = self._applied(aten._to_copy.default, found, [], {"dtype": dtype}, like)
        return self._applied(aten.transpose.int, found, [0, dim], {}, like)

    def _gathered(self, own: fx.Node, like: fx.Node) -> fx.Node:
        """Gather what all ranks along the axis have, one after the other."""
        assert self.over is not None
        own = self._contiguous(own, like)
        val: torch.Tensor = own.meta["val"]
        whole = val.new_empty(self.over.size * val.shape[0], *val.shape[1:])
        args = (own, self.over.size, self.over.group)
        started = self._call(c10d.all_gather_into_tensor.default, args, whole, like)
        role = Role.GRADIENT if "grad_of" in like.meta else Role.ACTIVATION
        of = (like.meta["grad_of"],) if "grad_of" in like.meta else ()
        why = f"parts of the batch, which each rank along {self.over.name} adds up in one order"
        started.meta["collective"] = Collective(Kind.ALL_GATHER, self.over.name, None, role, why, of)
        started.meta["most_bytes"] = whole.nbytes
        return self._call(WAIT, (started,), whole, like)

    def _of_all_parts(self, values: Sequence[fx.Node], like: fx.Node) -> Sequence[fx.Node]:
        """The values of all parts in order, of those of the parts of each rank."""
        if self.over is None:
            return values
        stacked = torch.stack([each.meta["val"] for each in values])
        gathered = self._gathered(self._call(aten.stack.default, (list(values),), stacked, like), like)
        flat = [part for of_rank in self.parts for part in of_rank]
        places = [flat.index(part) for part in range(self.count)]
        return [self._call(aten.select.int, (gathered, 0, at), stacked[0], like) for at in places]

    def _contiguous(self, value: fx.Node, like: fx.Node) -> fx.Node:
        return self._applied(aten.clone.default, value, [], {"memory_format": torch.contiguous_format}, like)

    def _total(self, node: fx.Node) -> fx.Node:
        """The sum over the parts for a sum over the axis of parts; that of a run stays one over the runs."""
        (value,) = node.all_input_nodes
        if self.in_runs:
            return self.graph.node_copy(node, lambda each: self._sum(self.copies[each], each, pending=True))
        total = self._sum(self.copies[value], next(iter(node.users)))
        self.totals.add(total)
        return total

    def _sum(self, values: Sequence[fx.Node], like: fx.Node, pending: bool = False) -> fx.Node:
        """A balanced tree over the parts; ``pending``: which are not all that there are."""
        values = self._of_all_parts(values, like)
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [self._call(aten.add.Tensor, pair, like.meta["val"], like) for pair in pairs]
        if not pending:
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
        is_drawn = self.over is None and any(each.target is draw for each in (node, *node.all_input_nodes))
        if not placement or not (placement[-1] == Replicate() or (is_drawn and placement[-1].is_shard())):
            for key in _OF_ALL:
                new.meta.pop(key, None)
        return new

    def _applied(self, op: Any, value: fx.Node, args: Sequence[Any], options: dict[str, Any], like: fx.Node) -> fx.Node:
        """An op of one tensor."""
        return self._call(op, (value, *args), op(value.meta["val"], *args, **options), like, options)

    def _call(
        self, op: Any, args: tuple[Any, ...], val: torch.Tensor, like: fx.Node, options: dict[str, Any] | None = None
    ) -> fx.Node:
        node = self.graph.create_node("call_function", op, args, options or {}, name=name_of(op))
        node.meta = {key: value for key, value in like.meta.items() if key not in _OF_ALL} | {"val": val}
        return node
