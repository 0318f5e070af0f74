"""Rows of a micro-batch where tokens of all ranks come to their experts: the micro-batch's part of each rank's rows.

Ranks split the batch, and micro-batches what a rank has. Where the ranks' parts are gathered, a micro-batch has runs of
the whole batch's rows, one of each rank; where sums go back, each rank takes its run again. No row changes its
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Axis, AxisRole, Mesh

from ...placements import Interleaved
from ..values import Value
from .axis import EXPERTS_AXIS
from .own_order import splits_tokens


def has_both(axis: Axis) -> bool:
    """Whether ranks along an axis have other tokens, and other experts."""
    return {AxisRole.BATCH, EXPERTS_AXIS} <= {*axis.roles} and axis.size > 1


def cut_in_place(value: Value, before: Sequence[Placement | None], mesh: Mesh) -> Shard | None:
    """The next axis's split of rows that moves none; None if it splits no part of what experts' axes do.

    ``before``: the placements in which an op reads the value along the axes before.
    """
    index = len(before)
    along = value.primary[index]
    if not isinstance(along, Shard) or not splits_tokens(mesh.axes[index]):
        return None
    for k in range(index):
        size, cut = mesh.axes[k].size, Shard(along.dim)
        both = value.primary[k] == along == cut or (along == Interleaved(along.dim, size) and value.primary[k] != cut)
        if has_both(mesh.axes[k]) and both:
            return cut if before[k] == cut else Interleaved(along.dim, size)
    return None


def is_one_cut(source: Placement, target: Placement, index: int, mesh: Mesh) -> bool:
    """Whether both are the same rows of micro-batches: as parts of ranks' parts, and as runs of all."""
    if not isinstance(source, Shard) or not isinstance(target, Shard) or not splits_tokens(mesh.axes[index]):
        return False
    before = [axis.size for axis in mesh.axes[:index] if has_both(axis)]
    pairs = [(Shard(source.dim), Interleaved(source.dim, size)) for size in before]
    return any((source, target) in (pair, pair[::-1]) for pair in pairs)
