"""Divide the parameters of a step along a tensor axis by columns, rows or not at all, by exact least cost.

In comes a captured step, whose forward is a graph of choices: where each parameter lies, and by which option of its
rule each op is computed. A pair of choices costs what the value between them takes to move, and its gradient back; an
op costs its work, or a part of it. Parameters that are split are read as they lie. The least sum of all is found by
elimination.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Phase, Program, Role
from passes.ir.ops import Trait, has
from passes.ir.rates import Rate
from passes.schedule.op_work import work_of

from ..partitioner.options import Options
from ..partitioner.redistribution_steps import cost
from ..partitioner.values import call_of, infos, leaves
from ..rules import Option
from .elimination import least

_PASSES = 3  # forward, and two of backward
_UPDATE = 20  # bytes that an update moves for each number
_NEVER = 1e9  # in the place of infinity, whose sums would be no numbers
_FLOPS, _MEMORY, _LINK = 4e14, 2.5e12, Rate(1e-5, 1 / 3e11)  # of a GPU in a host: recipes are the same for all kinds


def recipe(program: Program, axis: int) -> dict[str, int] | None:
    """The dim along which the axis at ``axis`` splits each parameter that it splits; None where that is not found."""
    graph = _Graph(program, axis)
    chosen = least(graph.alone, graph.pairs)
    if chosen is None:
        return None
    placed = {declared.name: graph.places[node][chosen[node]] for node, declared in graph.parameters.items()}
    return {name: p.dim for name, p in placed.items() if isinstance(p, Shard)}


class _Graph:
    """The choices of forward, with their costs. ``places``: of what is no op, where it may lie."""

    def __init__(self, program: Program, axis: int) -> None:
        self.axis, self.index = replace(program.mesh.axes[axis], rate=_LINK), axis
        self.options = Options(program.mesh)
        sizes = [i.shape[0] for i in program.inputs if i.role is Role.BATCH and i.shape]
        self.rows = max(sizes, default=1)  # all costs are those of one row
        inputs = dict(zip(program.placeholders, program.inputs, strict=True))
        self.parameters = {node: i for node, i in inputs.items() if i.role is Role.PARAMETER}
        self.weights = {*self.parameters}  # and what is made of these alone
        self.listed: dict[fx.Node, list[Option]] = {}
        self.places: dict[fx.Node, list[Placement]] = {}
        self.alone: dict[fx.Node, list[float]] = {}
        self.pairs: dict[tuple[fx.Node, fx.Node], Any] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
                self._add_input(node)
            elif node.meta.get("phase") is Phase.FORWARD and node.op == "call_function" and node.target is not getitem:
                self._add_op(node)

    def _add_input(self, node: fx.Node) -> None:
        shape = node.meta["val"].shape
        dims = [k for k, size in enumerate(shape) if size % self.axis.size == 0] if node in self.parameters else []
        self.places[node] = [Replicate(), *map(Shard, dims)]
        update = _UPDATE * node.meta["val"].numel() / _MEMORY
        self.alone[node] = [update, *[update / self.axis.size] * len(dims)]

    def _add_op(self, node: fx.Node) -> None:
        read = [each for each in leaves(node) if any(infos([each.meta.get("val")]))]
        whole = [Option((), (Replicate(),))]  # of what reads no tensor
        self.listed[node] = found = self.options.along(call_of(node), self.index) if read else whole
        if read and all(each in self.weights for each in read):
            self.weights.add(node)
        work, is_view = work_of(node), has(node.target, Trait.VIEW)
        seconds = 0.0 if is_view else _PASSES * max(work.flops / _FLOPS, work.bytes / _MEMORY) / self.rows
        self.alone[node] = [seconds / (self.axis.size if _divides(option) else 1) for option in found]
        for position, value in enumerate(read):
            source: Any = value.args[0] if value.target is getitem else value
            if source in self.alone:
                moved = self._moves(source, value, [(each.operands[position], _divides(each)) for each in found])
                both = self.pairs.get((source, node))
                self.pairs[source, node] = moved if both is None else both + moved

    def _moves(self, source: fx.Node, value: fx.Node, reads: list[tuple[Placement, bool]]) -> torch.Tensor:
        """For each place of a value and each read of it, the seconds to move it there, and its gradient back."""
        val, readers = value.meta["val"], max(1, len(value.users))
        size = val.nbytes if source in self.weights else val.nbytes / self.rows
        has_gradient = val.dtype.is_floating_point and (source in self.weights or source not in self.places)
        if source in self.places:
            held: list[Placement | None] = [*self.places[source]]
        else:
            index: Any = value.args[1] if value is not source else 0
            held = [each.results[index] for each in self.listed[source]]
        return torch.tensor(
            [
                [
                    min(_NEVER, _move(p, read, split, size, readers if has_gradient else 0, self.axis))
                    if source not in self.weights or p in (read, Replicate())
                    else _NEVER
                    for read, split in reads
                ]
                for p in held
            ],
            dtype=torch.float64,
        )


def _move(held: Placement | None, read: Placement, splits: bool, nbytes: float, readers: int, axis: Axis) -> float:
    """Seconds to read a value, and to bring back its gradient, of which each of ``readers`` has a part."""
    if held is None:
        return inf
    forward = cost(held, read, nbytes, axis, may_become_sum=True)
    if not readers:
        return forward
    made = Partial() if isinstance(read, Replicate) and splits else read if isinstance(read, Shard) else Replicate()
    needed = held if isinstance(held, Shard) else Replicate()
    return forward + cost(made, needed, nbytes, axis, may_become_sum=True) / readers


def _divides(option: Option) -> bool:
    """Whether each rank computes a part."""
    return any(isinstance(p, Shard) for p in (*option.operands, *option.results))
