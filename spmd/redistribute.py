"""From one placement to another: which collectives that takes, what it costs, and the nodes that do it.

Every rank emits the same nodes; only the sizes of slices differ. Uneven shards follow ``torch.chunk``: they are padded
to the longest one, so that all padding is at the end of what is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Collective, Kind, Mesh, Role
from passes.collectives import WAIT, c10d
from passes.program import Placements

from .placements import chunk

aten = torch.ops.aten
Emit = Callable[..., fx.Node]

# Starting a collective costs about as much as moving this many bytes (gloo and NCCL alike, to an order of magnitude).
LATENCY_BYTES = 64 * 1024
# Local work counts a little, so that of two ways without communication the one with less work is taken.
_LOCAL = 1e-3


@dataclass(frozen=True)
class Reason:
    """What a collective is for: kept in the graph, shown in reports."""

    role: Role = Role.ACTIVATION
    why: str = ""
    of: tuple[str, ...] = ()


def cost(source: Placement, target: Placement, nbytes: float, ranks: int, allow_split_sum: bool = False) -> float:
    """Bytes that one rank moves, latency included, to go from ``source`` to ``target`` along one axis.

    ``nbytes`` is the size of the value before this axis splits it. Infinite where there is no way.
    """
    if source == target or ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    match source, target:
        case Replicate(), Shard():
            return _LOCAL * nbytes / ranks
        case Replicate(), Partial(reduce_op="sum"):
            return _LOCAL * nbytes if allow_split_sum else math.inf
        case Shard(), Replicate():
            return LATENCY_BYTES + nbytes * share
        case Shard(), Shard():
            return LATENCY_BYTES + nbytes * share / ranks + _LOCAL * nbytes
        case Partial(), Replicate():
            return LATENCY_BYTES + 2 * nbytes * share
        case Partial(reduce_op="sum"), Shard():
            return LATENCY_BYTES + nbytes * share
        case Partial(), Shard():
            return LATENCY_BYTES + 2 * nbytes * share + _LOCAL * nbytes / ranks
        case _:
            return math.inf


def total_cost(source: Placements, target: Placements, nbytes: float, mesh: Mesh) -> float:
    """The sum of ``cost`` over the axes."""
    total = 0.0
    for before, after, axis in zip(source, target, mesh.axes, strict=True):
        total += cost(before, after, nbytes, axis.size, allow_split_sum=True)
    return total


@dataclass(frozen=True)
class Redistribution:
    """Emits the nodes that take one value from a placement to another."""

    emit: Emit
    mesh: Mesh
    shape: tuple[int, ...]  # global
    reason: Reason

    def run(self, node: fx.Node, source: Placements, target: Placements) -> fx.Node:
        """The value of ``node``, which has placement ``source``, in placement ``target``."""
        current = list(source)
        # Sums first, while they are smallest; then gathers, innermost axis first; then slices, outermost axis first.
        for index in self._order(source, target):
            goal = self._next(current, target, index)
            if goal != current[index]:
                node = self._step(node, current, index, goal)
                current[index] = goal
        for index, goal in enumerate(target):
            if goal != current[index]:
                node = self._step(node, current, index, goal)
                current[index] = goal
        return node

    def _order(self, source: Placements, target: Placements) -> list[int]:
        axes = range(len(source))
        sums = [k for k in axes if isinstance(source[k], Partial)]
        return sums + [k for k in reversed(axes) if k not in sums]

    def _next(self, current: list[Placement], target: Placements, index: int) -> Placement:
        """The next placement of one axis: straight to the target unless a dim is split over several axes."""
        goal = target[index]
        if isinstance(current[index], Replicate):
            return current[index]  # sliced at the end, outermost axis first
        if isinstance(goal, Shard) and self._shares_dim(current, target, index, goal):
            return Replicate()
        if isinstance(current[index], Shard) and goal == current[index] and self._outer_changes(current, target, index):
            return Replicate()
        return goal

    def _shares_dim(self, current: list[Placement], target: Placements, index: int, goal: Shard) -> bool:
        others = [p for k, p in enumerate([*current]) if k != index] + [p for k, p in enumerate(target) if k != index]
        return current[index] != goal and any(isinstance(p, Shard) and p.dim == goal.dim for p in others)

    def _outer_changes(self, current: list[Placement], target: Placements, index: int) -> bool:
        dim = current[index].dim  # type: ignore[attr-defined]
        outer = range(index)
        return any(current[k] != target[k] and (_splits(current[k], dim) or _splits(target[k], dim)) for k in outer)

    def _step(self, node: fx.Node, current: list[Placement], index: int, goal: Placement) -> fx.Node:
        axis = self.mesh.axes[index]
        source = current[index]
        if axis.size == 1:
            return node  # on one rank all placements are the same
        match source, goal:
            case Shard(dim=dim), Replicate():
                return self._all_gather(node, axis, dim, self._size(current, index, dim))
            case Partial(reduce_op=op), Replicate():
                return self._all_reduce(node, axis, op)
            case Partial(reduce_op="sum"), Shard(dim=dim):
                return self._reduce_scatter(node, axis, dim, self._size(current, index, dim))
            case Partial(reduce_op=op), Shard(dim=dim):
                reduced = self._all_reduce(node, axis, op)
                return self._slice(reduced, axis, dim, self._size(current, index, dim))
            case Replicate(), Shard(dim=dim):
                return self._slice(node, axis, dim, self._size(current, index, dim))
            case Replicate(), Partial(reduce_op="sum"):
                return self.emit(aten.div.Scalar, (node, axis.size))
            case Shard(dim=before), Shard(dim=after):
                return self._move(node, axis, before, after, current, index)
        raise AssertionError(f"no way from {source} to {goal}")

    def _size(self, current: list[Placement], index: int, dim: int) -> int:
        """The size of ``dim`` before the axis at ``index`` splits it, on this rank."""
        size = self.shape[dim]
        for k in range(index):
            if _splits(current[k], dim):
                size = chunk(size, self.mesh.axes[k].size, self.mesh.axes[k].coordinate)[1]
        return size

    def _all_reduce(self, node: fx.Node, axis: Axis, op: str) -> fx.Node:
        return self._collective(Kind.ALL_REDUCE, axis, c10d.all_reduce.default, (node, op, axis.group), op)

    def _all_gather(self, node: fx.Node, axis: Axis, dim: int, size: int) -> fx.Node:
        part = -(-size // axis.size)
        node = self._pad(node, dim, part, size % axis.size != 0)
        node = self.emit(aten.contiguous.default, (node,))
        rest = list(node.meta["val"].shape)
        node = self._collective(
            Kind.ALL_GATHER, axis, c10d.all_gather_into_tensor.default, (node, axis.size, axis.group)
        )
        if dim:
            node = self.emit(aten.view.default, (node, [axis.size, *rest]))
            node = self.emit(aten.permute.default, (node, [*range(1, dim + 1), 0, *range(dim + 1, len(rest) + 1)]))
            merged = [*rest[:dim], axis.size * rest[dim], *rest[dim + 1 :]]
            node = self.emit(aten.reshape.default, (node, merged))
        return self.emit(aten.slice.Tensor, (node, dim, 0, size)) if size % axis.size else node

    def _reduce_scatter(self, node: fx.Node, axis: Axis, dim: int, size: int) -> fx.Node:
        part = -(-size // axis.size)
        node = self._pad(node, dim, part * axis.size, size % axis.size != 0)
        node = self._parts_first(node, axis, dim, part)
        arguments = (node, "sum", axis.size, axis.group)
        node = self._collective(Kind.REDUCE_SCATTER, axis, c10d.reduce_scatter_tensor.default, arguments, "sum")
        length = chunk(size, axis.size, axis.coordinate)[1]
        return self.emit(aten.slice.Tensor, (node, dim, 0, length)) if size % axis.size else node

    def _parts_first(self, node: fx.Node, axis: Axis, dim: int, part: int) -> fx.Node:
        """Lay the parts of ``dim`` out one after the other along dim 0, where scatters cut."""
        if dim:
            shape = list(node.meta["val"].shape)
            node = self.emit(aten.reshape.default, (node, [*shape[:dim], axis.size, part, *shape[dim + 1 :]]))
            node = self.emit(aten.permute.default, (node, [dim, *range(dim), *range(dim + 1, len(shape) + 1)]))
            shape[dim] = part
            node = self.emit(aten.reshape.default, (node, [axis.size * shape[0], *shape[1:]]))
        return self.emit(aten.contiguous.default, (node,))

    def _move(
        self, node: fx.Node, axis: Axis, before: int, after: int, current: list[Placement], index: int
    ) -> fx.Node:
        """From a split along one dim to a split along another."""
        size_before, size_after = self._size(current, index, before), self._size(current, index, after)
        if size_before % axis.size or size_after % axis.size:
            whole = self._all_gather(node, axis, before, size_before)
            return self._slice(whole, axis, after, size_after)
        node = self._parts_first(node, axis, after, size_after // axis.size)
        shape = list(node.meta["val"].shape)
        splits = [shape[0] // axis.size] * axis.size
        node = self._collective(
            Kind.ALL_TO_ALL, axis, c10d.all_to_all_single.default, (node, splits, splits, axis.group)
        )
        if before == 0:
            return node
        part = [shape[0] // axis.size, *shape[1:]]
        node = self.emit(aten.view.default, (node, [axis.size, *part]))
        node = self.emit(aten.permute.default, (node, [*range(1, before + 1), 0, *range(before + 1, len(part) + 1)]))
        part[before] *= axis.size
        return self.emit(aten.reshape.default, (node, part))

    def _slice(self, node: fx.Node, axis: Axis, dim: int, size: int) -> fx.Node:
        start, length = chunk(size, axis.size, axis.coordinate)
        return self.emit(aten.slice.Tensor, (node, dim, start, start + length))

    def _pad(self, node: fx.Node, dim: int, size: int, uneven: bool) -> fx.Node:
        """Pad ``dim`` at its end up to ``size``. Ranks agree whether there is a pad, not on how long it is."""
        if not uneven:
            return node
        shape = node.meta["val"].shape
        pad = [0, 0] * (len(shape) - dim - 1) + [0, size - shape[dim]]
        return self.emit(aten.constant_pad_nd.default, (node, pad))

    def _collective(
        self, kind: Kind, axis: Axis, op: Any, arguments: tuple[Any, ...], reduction: str | None = None
    ) -> fx.Node:
        described = Collective(kind, axis.name, reduction, self.reason.role, self.reason.why, self.reason.of)
        return self.emit(WAIT, (self.emit(op, arguments, collective=described),))


def _splits(placement: Placement, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim
