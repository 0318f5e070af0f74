"""From one placement to another: which collectives that takes, what it costs, and the nodes that do it.

Every rank emits the same nodes; only the sizes of slices and pads differ. Uneven shards follow ``torch.chunk``: they
are padded to the longest one, so that all padding is at the end of what is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Collective, Kind, Mesh, Role
from passes.ir.collectives import WAIT, c10d
from passes.ir.program import Placements

from ..placements import Interleaved, all_shapes, chunk, splits

aten = torch.ops.aten
Emit = Callable[..., fx.Node]

# Reading and writing a byte here counts as this share of sending it: without communication, the least work is chosen.
_LOCAL = 1e-3
_MOVED = {Kind.ALL_GATHER: "gathered", Kind.ALL_TO_ALL: "split anew"}


@dataclass(frozen=True)
class Reason:
    """What a collective is for: kept in the graph, shown in reports.

    ``value`` names what is moved, where its role says too little; ``use`` ends the text: "for mm at model.up".
    ``wire``: the dtype in which it is sent, where that is narrower than the value's. ``keeps_own``: of what is gathered
    so, a rank's own part is as it was before.
    """

    role: Role = Role.ACTIVATION
    use: str = ""
    of: tuple[str, ...] = ()
    wire: torch.dtype | None = None
    keeps_own: bool = False
    value: str = ""

    def why(self, kind: Kind, axis: str, reduction: str | None) -> str:
        """The text for a collective of this kind: ``parameter: gathered before use``."""
        moved = f"{reduction} over {axis}" if reduction else _MOVED[kind]
        return f"{self.value or self.role}: {moved} {self.use}".rstrip()

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether a value of this dtype is rounded to be sent."""
        return self.wire is not None and dtype.is_floating_point and dtype.itemsize > self.wire.itemsize


def cost(source: Placement, target: Placement, nbytes: float, axis: Axis, allow_split_sum: bool = False) -> float:
    """Seconds to go from ``source`` to ``target`` along one axis, estimated from its rate and the bytes a rank sends.

    ``nbytes`` is the size of the value before this axis splits it. Infinite where there is no way.
    """
    ranks, rate = axis.size, axis.rate
    if source == target or ranks == 1:
        return 0.0
    part, rest = nbytes / ranks, nbytes * (ranks - 1) / ranks
    match source, target:
        case (Interleaved(), Shard()) | (Shard(), Interleaved()):
            return cost(source, Replicate(), nbytes, axis) + local_work(part, axis)
        case Replicate(), Shard():
            return local_work(part, axis)
        case Replicate(), Partial(reduce_op="sum"):
            return local_work(nbytes, axis) if allow_split_sum else math.inf
        case Shard(), Replicate():
            return rate.seconds(rest)
        case Shard(), Shard():
            return rate.seconds(rest / ranks) + local_work(nbytes, axis)
        case Partial(), Replicate():
            return rate.seconds(2 * rest)
        case Partial(reduce_op="sum"), Shard():
            return rate.seconds(rest)
        case Partial(), Shard():
            return rate.seconds(2 * rest) + local_work(part, axis)
        case _:
            return math.inf


def local_work(nbytes: float, axis: Axis) -> float:
    """Seconds, next to none, in which a rank reads and writes this many bytes."""
    return _LOCAL * nbytes * axis.rate.per_byte


def total_cost(source: Placements, target: Placements, nbytes: float, mesh: Mesh) -> float:
    """The sum of ``cost`` over the steps from ``source`` to ``target``; the whole value has ``nbytes``."""
    total = 0.0
    for current, index, goal in steps(source, target, mesh):
        others = [axis.size for k, axis in enumerate(mesh.axes) if k != index and isinstance(current[k], Shard)]
        nbytes_here = nbytes / math.prod(others)
        total += cost(current[index], goal, nbytes_here, mesh.axes[index], allow_split_sum=True)
    return total


def steps(source: Placements, target: Placements, mesh: Mesh) -> Iterator[tuple[Placements, int, Placement]]:
    """The way from ``source`` to ``target``: each placement on it, the axis that changes there, and what to.

    Slices first, then sums, then gathers, so that little is communicated. A dim that several axes split is cut by the
    outermost one first: an axis that would break this order is made whole, and cut in the end.
    """
    current, goals = _on_many_ranks(source, mesh), _on_many_ranks(target, mesh)
    axes = range(len(current))
    whole = [k for k in axes if isinstance(current[k], Replicate)]
    sums = [k for k in axes if isinstance(current[k], Partial)]
    split = [k for k in reversed(axes) if isinstance(current[k], Shard)]
    for index in [*whole, *sums, *split, *axes]:
        goal = goals[index] if _keeps_order(current, goals, index) else Replicate()
        if goal != current[index]:
            yield tuple(current), index, goal
            current[index] = goal


def _on_many_ranks(placements: Placements, mesh: Mesh) -> list[Placement]:
    """On one rank all placements are the same."""
    return [Replicate() if axis.size == 1 else p for p, axis in zip(placements, mesh.axes, strict=True)]


def _keeps_order(current: Sequence[Placement], goals: Sequence[Placement], index: int) -> bool:
    """Whether the axis at ``index`` can take its goal now: cut inside what outer axes leave, and outside inner ones."""
    goal = goals[index]
    if not isinstance(goal, Shard):
        return True
    outer = [k for k in range(index) if splits(current[k], goal.dim) or splits(goals[k], goal.dim)]
    outer_done = all(current[k] == goals[k] for k in outer)
    inner_cuts = any(splits(placement, goal.dim) for placement in current[index + 1 :])
    return outer_done and (goal == current[index] or not inner_cuts)


@dataclass(frozen=True)
class _Cut:
    """What one axis cuts: ``size`` is what the axes before leave of ``dim`` on this rank.

    ``even``: whether all ranks of the mesh have equal parts. Ranks agree on that, though some of them may have nothing
    to pad: so they emit the same nodes. ``before``: what the value is where this axis cuts nothing.
    """

    dim: int
    size: int
    even: bool
    before: Placements


@dataclass(frozen=True)
class Redistribution:
    """Emits the nodes that take one value from a placement to another."""

    emit: Emit
    mark: Callable[[fx.Node, tuple[Sequence[int], Placements]], None]
    mesh: Mesh
    shape: tuple[int, ...]  # global
    reason: Reason

    def run(self, node: fx.Node, source: Placements, target: Placements) -> fx.Node:
        """The value of ``node``, which has placement ``source``, in placement ``target``."""
        for current, index, goal in steps(source, target, self.mesh):
            node = self._to(goal, node, current, index)
        return node

    def _to(self, goal: Placement, node: fx.Node, current: Placements, index: int) -> fx.Node:
        """One step. A cut that takes nothing off on this rank may do so on others: its placement tells passes so."""
        node = self._step(goal, node, current, index)
        node.meta["placement"] = _with(current, index, goal)
        self.mark(node, (self.shape, node.meta["placement"]))
        return node

    def _step(self, goal: Placement, node: fx.Node, current: Placements, index: int) -> fx.Node:
        axis, whole = self.mesh.axes[index], _with(current, index, Replicate())
        match current[index], goal:
            case (Interleaved(), Shard()) | (Shard(), Interleaved()):
                return self._to(goal, self._to(Replicate(), node, current, index), whole, index)
            case Interleaved() as runs, Replicate():
                return self._in_runs(node, runs, current, index, self._all_gather)
            case Partial(reduce_op="sum"), Interleaved() as runs:
                return self._in_runs(node, runs, current, index, self._reduce_scatter)
            case Partial(reduce_op=op), Interleaved() as runs:
                return self._in_runs(self._all_reduce(node, axis, op, whole), runs, current, index, self._slice)
            case Replicate(), Interleaved() as runs:
                return self._in_runs(node, runs, current, index, self._slice)
            case Shard(dim=dim), Replicate():
                return self._all_gather(node, axis, self._cut(current, index, dim))
            case Partial(reduce_op=op), Replicate():
                return self._all_reduce(node, axis, op, whole)
            case Partial(reduce_op="sum"), Shard(dim=dim):
                return self._reduce_scatter(node, axis, self._cut(current, index, dim))
            case Partial(reduce_op=op), Shard(dim=dim):
                return self._slice(self._all_reduce(node, axis, op, whole), axis, self._cut(current, index, dim))
            case Replicate(), Shard(dim=dim):
                return self._slice(node, axis, self._cut(current, index, dim))
            case Replicate(), Partial(reduce_op="sum"):
                return self.emit(aten.div.Scalar, (node, axis.size))
            case Shard(dim=before), Shard(dim=after):
                cuts = self._cut(current, index, before), self._cut(current, index, after)
                if all(cut.even for cut in cuts):
                    return self._move(node, axis, *cuts)
                return self._to(goal, self._to(Replicate(), node, current, index), whole, index)
        raise AssertionError(f"no way from {current[index]} to {goal}")

    def _cut(self, current: Placements, index: int, dim: int) -> _Cut:
        """How the axis at ``index`` cuts ``dim``, after the axes before it."""
        size, ranks = self.shape[dim], self.mesh.axes[index].size
        for placement, axis in zip(current[:index], self.mesh.axes, strict=False):
            if splits(placement, dim):
                size = chunk(size, axis.size, axis.coordinate)[1]
                ranks *= axis.size
        return _Cut(dim, size, self.shape[dim] % ranks == 0, _with(current, index, Replicate()))

    def _in_runs(
        self,
        node: fx.Node,
        runs: Interleaved,
        current: Placements,
        index: int,
        work: Callable[[fx.Node, Axis, _Cut], fx.Node],
    ) -> fx.Node:
        """Do ``work`` on the rows of each run, which are a dim of their own meanwhile."""
        dim, outer, before = runs.dim, runs.outer, list(node.meta["val"].shape)
        apart = [*before[:dim], outer, before[dim] // outer, *before[dim + 1 :]]
        cut = _Cut(dim + 1, self._cut(current, index, dim).size // outer, True, _with(current, index, Replicate()))
        node = work(self.emit(aten.reshape.default, (node, apart)), self.mesh.axes[index], cut)
        node.meta["placement"] = _with(current, index, Replicate() if current[index] == runs else runs)
        after = node.meta["val"].shape[dim + 1]
        return self.emit(aten.reshape.default, (node, [*before[:dim], outer * after, *before[dim + 1 :]]))

    def _all_reduce(self, node: fx.Node, axis: Axis, op: str, whole: Placements) -> fx.Node:
        most = math.prod(self._longest(whole))
        return self._collective(Kind.ALL_REDUCE, axis, c10d.all_reduce.default, (node, op, axis.group), most, op)

    def _all_gather(self, own: fx.Node, axis: Axis, cut: _Cut) -> fx.Node:
        node = self._pad(own, cut, -(-cut.size // axis.size))
        node = self.emit(aten.contiguous.default, (node,))
        part = list(node.meta["val"].shape)
        arguments, most = (node, axis.size, axis.group), self._most(axis, cut)
        node = self._collective(Kind.ALL_GATHER, axis, c10d.all_gather_into_tensor.default, arguments, most)
        node = self._side_by_side(node, axis, cut.dim, part)
        node = node if cut.even else self.emit(aten.slice.Tensor, (node, cut.dim, 0, cut.size))
        if not (self.reason.keeps_own and self.reason.narrows(own.meta["val"].dtype)):
            return node
        start, length = chunk(cut.size, axis.size, axis.coordinate)
        return self.emit(aten.slice_scatter.default, (node, own, cut.dim, start, start + length))

    def _reduce_scatter(self, node: fx.Node, axis: Axis, cut: _Cut) -> fx.Node:
        part = -(-cut.size // axis.size)
        node = self._pad(node, cut, part * axis.size)
        node = self._parts_first(node, axis, cut.dim, part)
        arguments, most = (node, "sum", axis.size, axis.group), self._most(axis, cut)
        node = self._collective(Kind.REDUCE_SCATTER, axis, c10d.reduce_scatter_tensor.default, arguments, most, "sum")
        length = chunk(cut.size, axis.size, axis.coordinate)[1]
        return node if cut.even else self.emit(aten.slice.Tensor, (node, cut.dim, 0, length))

    def _parts_first(self, node: fx.Node, axis: Axis, dim: int, part: int) -> fx.Node:
        """Lay the parts of ``dim`` out one after the other along dim 0, where scatters cut."""
        if dim:
            shape = list(node.meta["val"].shape)
            node = self.emit(aten.reshape.default, (node, [*shape[:dim], axis.size, part, *shape[dim + 1 :]]))
            node = self.emit(aten.permute.default, (node, [dim, *range(dim), *range(dim + 1, len(shape) + 1)]))
            shape[dim] = part
            node = self.emit(aten.reshape.default, (node, [axis.size * shape[0], *shape[1:]]))
        return self.emit(aten.contiguous.default, (node,))

    def _side_by_side(self, node: fx.Node, axis: Axis, dim: int, part: list[int]) -> fx.Node:
        """The other way: from parts of shape ``part`` along dim 0, where gathers put them, to parts along ``dim``."""
        if dim:
            node = self.emit(aten.view.default, (node, [axis.size, *part]))
            node = self.emit(aten.permute.default, (node, [*range(1, dim + 1), 0, *range(dim + 1, len(part) + 1)]))
            node = self.emit(aten.reshape.default, (node, [*part[:dim], axis.size * part[dim], *part[dim + 1 :]]))
        return node

    def _move(self, node: fx.Node, axis: Axis, before: _Cut, after: _Cut) -> fx.Node:
        """From a split along one dim to a split along another, both even."""
        node = self._parts_first(node, axis, after.dim, after.size // axis.size)
        rows, *rest = node.meta["val"].shape
        splits = [rows // axis.size] * axis.size
        arguments, most = (node, splits, splits, axis.group), self._most(axis, before) // axis.size
        node = self._collective(Kind.ALL_TO_ALL, axis, c10d.all_to_all_single.default, arguments, most)
        return self._side_by_side(node, axis, before.dim, [splits[0], *rest])

    def _slice(self, node: fx.Node, axis: Axis, cut: _Cut) -> fx.Node:
        start, length = chunk(cut.size, axis.size, axis.coordinate)
        return self.emit(aten.slice.Tensor, (node, cut.dim, start, start + length))

    def _pad(self, node: fx.Node, cut: _Cut, size: int) -> fx.Node:
        """Pad at the end of the dim up to ``size``."""
        if cut.even:
            return node
        shape = node.meta["val"].shape
        pad = [0, 0] * (len(shape) - cut.dim - 1) + [0, size - shape[cut.dim]]
        node = self.emit(aten.constant_pad_nd.default, (node, pad))
        self.mark(node, (self.shape, cut.before))  # as even as what is cut, since all parts are padded alike
        node.meta["numbers"] = f"a pad of dim {cut.dim} of {self.shape} to {size}, from {cut.before}"
        return node

    def _most(self, axis: Axis, cut: _Cut) -> int:
        """Elements of what ``axis`` cuts, padding included, on the rank that has the most."""
        shape = list(self._longest(cut.before))
        if not cut.even:
            shape[cut.dim] = -(-shape[cut.dim] // axis.size) * axis.size
        return math.prod(shape)

    def _longest(self, placement: Placements) -> tuple[int, ...]:
        """The shape of the first rank's part: no rank has a longer one, along any dim."""
        return all_shapes(self.shape, placement, self.mesh.axes)[0]

    def _collective(
        self, kind: Kind, axis: Axis, op: Any, arguments: tuple[Any, ...], most: int, reduction: str | None = None
    ) -> fx.Node:
        """``most``: elements of the larger of operand and result, on the rank that has the most."""
        why = self.reason.why(kind, axis.name, reduction)
        described = Collective(kind, axis.name, reduction, self.reason.role, why, self.reason.of)
        sent, *others = arguments
        dtype, narrow = sent.meta["val"].dtype, self.reason.narrows(sent.meta["val"].dtype)
        if narrow:
            sent = self.emit(aten._to_copy.default, (sent,), dtype=self.reason.wire)
        started = self.emit(op, (sent, *others), collective=described)
        started.meta["most_bytes"] = most * sent.meta["val"].dtype.itemsize
        node = self.emit(WAIT, (started,))
        return self.emit(aten._to_copy.default, (node,), dtype=dtype) if narrow else node


def _with(placements: Placements, index: int, placement: Placement) -> Placements:
    return (*placements[:index], placement, *placements[index + 1 :])
