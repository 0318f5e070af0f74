"""Redistribute a value from one placement to another: the collectives, slices and pads of each step.

Every rank emits the same nodes; only the sizes of slices and pads differ. Uneven shards follow ``torch.chunk``: they
are padded to the longest one, so that all padding is at the end of what is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, Collective, Kind, Mesh, Role
from passes.ir.collectives import WAIT, c10d
from passes.ir.program import Placements

from ..placements import Interleaved, Mirrored, OwnOrder, OwnRows, all_shapes, chunk, local_shape, splits
from .experts.own_rows import Own
from .redistribution_steps import steps

aten = torch.ops.aten
Emit = Callable[..., fx.Node]
_MOVED = {Kind.ALL_GATHER: "gathered", Kind.ALL_TO_ALL: "split anew"}


@dataclass(frozen=True)
class Reason:
    """The purpose of a collective, as the graph and reports have it.

    ``value`` names what is moved, where its role says too little; ``use`` ends the text: "for mm at model.up".
    ``wire``: the dtype in which it is sent, where that is narrower than the value's; a gradient is summed in it also
    where it is wider. ``reader``: the op of the global graph that reads the value.
    """

    role: Role = Role.ACTIVATION
    use: str = ""
    of: tuple[str, ...] = ()
    wire: torch.dtype | None = None
    value: str = ""
    reader: fx.Node | None = None

    def why(self, kind: Kind, axis: str, reduction: str | None) -> str:
        """The text for a collective of this kind: ``parameter: gathered before use``."""
        moved = f"{reduction} over {axis}" if reduction else _MOVED[kind]
        return f"{self.value or self.role}: {moved} {self.use}".rstrip()

    def narrows(self, dtype: torch.dtype) -> bool:
        """Whether a value of this dtype is rounded to be sent."""
        return self.wire is not None and dtype.is_floating_point and dtype.itemsize > self.wire.itemsize

    def casts(self, dtype: torch.dtype) -> bool:
        """Whether a value of this dtype is sent in another one."""
        differs = self.wire is not None and dtype.is_floating_point and dtype is not self.wire
        return differs and (self.role is Role.GRADIENT or self.narrows(dtype))


@dataclass(frozen=True)
class _Cut:
    """A cut of ``dim`` by one axis: ``size`` is the length that the axes before leave on this rank.

    ``even``: whether all ranks of the mesh have equal parts. Ranks agree on that, though some of them may have nothing
    to pad: so they emit the same nodes. ``before``: the placement of the value without this cut.
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
    own: Callable[[OwnRows, int, Placements, int, fx.Node], Own] | None = None

    def run(self, node: fx.Node, source: Placements, target: Placements) -> fx.Node:
        """The value of ``node``, which has placement ``source``, in placement ``target``."""
        before = node.meta["val"].dtype
        for current, index, goal in steps(source, target, self.mesh):
            node = self._to(goal, node, current, index)
        if before is torch.bool and node.meta["val"].dtype is not before:  # own rows are put back as sums of integers
            node = self.emit(aten._to_copy.default, (node,), dtype=before)
            self.mark(node, (self.shape, target))
        return node

    def _to(self, goal: Placement, node: fx.Node, current: Placements, index: int) -> fx.Node:
        """One step. Its placement is marked, since a cut that takes nothing off on this rank may do so on others."""
        node = self._step(goal, node, current, index)
        node.meta["placement"] = _with(current, index, goal)
        self.mark(node, (self.shape, node.meta["placement"]))
        return node

    def _step(self, goal: Placement, node: fx.Node, current: Placements, index: int) -> fx.Node:
        axis, whole = self.mesh.axes[index], _with(current, index, Replicate())
        match current[index], goal:
            case (_, OwnRows() as rows) | (OwnRows() as rows, _):
                assert self.own is not None, "own rows occur in programs alone"
                size = local_shape(self.shape, whole, self.mesh)[rows.dim]
                own = self.own(rows, index, current, size, node)
                return own.taken(self.emit, node) if rows == goal else own.put_back(self.emit, node)
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
                    return self._all_to_all(node, axis, *cuts)
                return self._to(goal, self._to(Replicate(), node, current, index), whole, index)
        raise AssertionError(f"no step from {current[index]} to {goal}")

    def _cut(self, current: Placements, index: int, dim: int) -> _Cut:
        """The cut of ``dim`` by the axis at ``index``, after the axes before it, and those that cut its runs."""
        size, ranks = self.shape[dim], self.mesh.axes[index].size
        for k, (placement, axis) in enumerate(zip(current, self.mesh.axes, strict=True)):
            if k != index and (splits(placement, dim) or placement == OwnOrder(dim)):
                is_outer = k < index and isinstance(placement, Shard)
                size = chunk(size, axis.size, axis.coordinate)[1] if is_outer else size // axis.size
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
        unflattened = [*before[:dim], outer, before[dim] // outer, *before[dim + 1 :]]
        cut = _Cut(dim + 1, self._cut(current, index, dim).size // outer, True, _with(current, index, Replicate()))
        node = self.emit(aten.reshape.default, (node, unflattened))
        ranks, mirrored = self.mesh.axes[index].size, isinstance(runs, Mirrored)
        if mirrored and current[index] != runs:
            node = self._in_order_of_ranks(node, dim + 1, ranks)
        node = work(node, self.mesh.axes[index], cut)
        if mirrored and current[index] == runs:
            node = self._in_order_of_rows(node, dim + 1, ranks)
        node.meta["placement"] = _with(current, index, Replicate() if current[index] == runs else runs)
        after = node.meta["val"].shape[dim + 1]
        return self.emit(aten.reshape.default, (node, [*before[:dim], outer * after, *before[dim + 1 :]]))

    def _in_order_of_ranks(self, node: fx.Node, dim: int, ranks: int) -> fx.Node:
        """Arrange all rows of a mirrored dim so that those of each rank follow one another."""
        pieces = self._unflattened(node, dim, 2 * ranks)
        early = self.emit(aten.slice.Tensor, (pieces, dim, 0, ranks))
        late = self.emit(aten.flip.default, (self.emit(aten.slice.Tensor, (pieces, dim, ranks, 2 * ranks)), [dim]))
        both = self.emit(aten.stack.default, ([early, late], dim + 1))
        return self.emit(aten.reshape.default, (both, list(node.meta["val"].shape)))

    def _in_order_of_rows(self, node: fx.Node, dim: int, ranks: int) -> fx.Node:
        """Undo ``_in_order_of_ranks``."""
        pairs = self._unflattened(node, dim, ranks, 2)
        early, late = (self.emit(aten.select.int, (pairs, dim + 1, k)) for k in range(2))
        both = self.emit(aten.cat.default, ([early, self.emit(aten.flip.default, (late, [dim]))], dim))
        return self.emit(aten.reshape.default, (both, list(node.meta["val"].shape)))

    def _unflattened(self, node: fx.Node, dim: int, *sizes: int) -> fx.Node:
        shape = list(node.meta["val"].shape)
        return self.emit(
            aten.reshape.default, (node, [*shape[:dim], *sizes, shape[dim] // math.prod(sizes), *shape[dim + 1 :]])
        )

    def _all_reduce(self, node: fx.Node, axis: Axis, op: str, whole: Placements) -> fx.Node:
        most = math.prod(self._longest(whole))
        return self._collective(Kind.ALL_REDUCE, axis, c10d.all_reduce.default, (node, op, axis.group), most, op)

    def _all_gather(self, node: fx.Node, axis: Axis, cut: _Cut) -> fx.Node:
        node = self._pad(node, cut, -(-cut.size // axis.size))
        node = self.emit(aten.contiguous.default, (node,))
        part = list(node.meta["val"].shape)
        arguments, most = (node, axis.size, axis.group), self._most(axis, cut)
        node = self._collective(Kind.ALL_GATHER, axis, c10d.all_gather_into_tensor.default, arguments, most)
        node = self._side_by_side(node, axis, cut.dim, part)
        return node if cut.even else self.emit(aten.slice.Tensor, (node, cut.dim, 0, cut.size))

    def _reduce_scatter(self, node: fx.Node, axis: Axis, cut: _Cut) -> fx.Node:
        part = -(-cut.size // axis.size)
        node = self._pad(node, cut, part * axis.size)
        node = self._parts_first(node, axis, cut.dim, part)
        arguments, most = (node, "sum", axis.size, axis.group), self._most(axis, cut)
        node = self._collective(Kind.REDUCE_SCATTER, axis, c10d.reduce_scatter_tensor.default, arguments, most, "sum")
        length = chunk(cut.size, axis.size, axis.coordinate)[1]
        return node if cut.even else self.emit(aten.slice.Tensor, (node, cut.dim, 0, length))

    def _parts_first(self, node: fx.Node, axis: Axis, dim: int, part: int) -> fx.Node:
        """Arrange the parts of ``dim`` one after the other along dim 0, where scatters cut."""
        if dim:
            shape = list(node.meta["val"].shape)
            node = self.emit(aten.reshape.default, (node, [*shape[:dim], axis.size, part, *shape[dim + 1 :]]))
            node = self.emit(aten.permute.default, (node, [dim, *range(dim), *range(dim + 1, len(shape) + 1)]))
            shape[dim] = part
            node = self.emit(aten.reshape.default, (node, [axis.size * shape[0], *shape[1:]]))
        return self.emit(aten.contiguous.default, (node,))

    def _side_by_side(self, node: fx.Node, axis: Axis, dim: int, part: list[int]) -> fx.Node:
        """Arrange parts of shape ``part``, which gathers put along dim 0, one after the other along ``dim``."""
        if dim:
            node = self.emit(aten.view.default, (node, [axis.size, *part]))
            node = self.emit(aten.permute.default, (node, [*range(1, dim + 1), 0, *range(dim + 1, len(part) + 1)]))
            node = self.emit(aten.reshape.default, (node, [*part[:dim], axis.size * part[dim], *part[dim + 1 :]]))
        return node

    def _all_to_all(self, node: fx.Node, axis: Axis, before: _Cut, after: _Cut) -> fx.Node:
        """Split along another dim than before, both evenly."""
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
        self.mark(node, (self.shape, cut.before))  # as even as before the cut, since all parts are padded equally
        node.meta["numbers"] = f"a pad of dim {cut.dim} of {self.shape} to {size}, from {cut.before}"
        return node

    def _most(self, axis: Axis, cut: _Cut) -> int:
        """Elements of the value that ``axis`` cuts, padding included, on the rank that has the most."""
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
        dtype = sent.meta["val"].dtype
        # A sum over what is no ranks stays here: no need to round it.
        casts = self.reason.casts(dtype) and (axis.of_ranks or not self.reason.narrows(dtype))
        if casts:
            sent = self.emit(aten._to_copy.default, (sent,), dtype=self.reason.wire)
        started = self.emit(op, (sent, *others), collective=described)
        started.meta["most_bytes"] = most * sent.meta["val"].dtype.itemsize
        node = self.emit(WAIT, (started,))
        return self.emit(aten._to_copy.default, (node,), dtype=dtype) if casts else node


def _with(placements: Placements, index: int, placement: Placement) -> Placements:
    return (*placements[:index], placement, *placements[index + 1 :])
