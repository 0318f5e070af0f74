"""Put global values together from the parts of all ranks, by their placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from passes import Mesh
from passes.ir.program import Placements

from ..placements import Interleaved, Mirrored, extent, mirrored_pieces
from ..ranks.differences import Difference, difference


class UnequalReplicasError(Exception):
    """Ranks that should hold equal values do not."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.says)
        self.difference = difference


def part_of(whole: Tensor, placement: Placements, mesh: Mesh) -> Tensor:
    """A rank's part of a whole tensor; all of it along axes that do not split it."""
    for entry, axis in zip(placement, mesh.axes, strict=False):
        if isinstance(entry, Shard):
            outer = entry.outer if isinstance(entry, Interleaved) else 1
            runs = whole.unflatten(entry.dim, (outer, -1)) if outer > 1 else whole.unsqueeze(entry.dim)
            if isinstance(entry, Mirrored):
                pieces = runs.unflatten(entry.dim + 1, (2 * axis.size, -1)).unbind(entry.dim + 1)
                runs = torch.cat([pieces[k] for k in mirrored_pieces(axis.coordinate, axis.size)], entry.dim + 1)
            else:
                runs = runs.narrow(entry.dim + 1, *extent(entry, runs.shape[entry.dim + 1], axis))
            whole = runs.flatten(entry.dim, entry.dim + 1)
    return whole


def put_together(
    parts: Sequence[Any], shape: Sequence[int], placement: Placements, meshes: Sequence[Mesh], rounding: float
) -> Any:
    """The global value of which each rank, with its mesh, has a part; plain values as they are on the first rank.

    Raises ``UnequalReplicasError`` where ranks hold the same part with other values.
    """
    if not all(isinstance(part, Tensor) for part in parts):
        return _equal_on_all(parts)
    owners: dict[tuple[int, ...], int] = {}
    for rank, mesh in enumerate(meshes):
        owner = owners.setdefault(_owner(placement, mesh), rank)
        _check_replica(parts, owner, rank, rounding)
    if len(owners) == 1:
        return parts[0]
    summed = any(isinstance(entry, Partial) for entry in placement)
    positions = torch.arange(torch.Size(shape).numel()).view(tuple(shape))
    whole = torch.zeros(positions.numel(), dtype=parts[0].dtype, device=parts[0].device)
    for rank in owners.values():
        mine = part_of(positions, placement, meshes[rank]).reshape(-1)
        if mine.numel() != parts[rank].numel():
            says = f"rank {rank} has {tuple(parts[rank].shape)}, which is no part of {tuple(shape)} under {placement}"
            raise UnequalReplicasError(Difference(tuple(shape), tuple(parts[rank].shape), says))
        values = parts[rank].detach().reshape(-1)
        whole[mine] = whole[mine] + values if summed else values
    return whole.view(tuple(shape))


def _owner(placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The key of ranks that hold the same part: their coordinates along axes that divide it."""
    axes = zip(placement, mesh.axes, strict=False)
    return tuple(axis.coordinate for entry, axis in axes if isinstance(entry, (Shard, Partial)))


def _check_replica(parts: Sequence[Tensor], owner: int, rank: int, rounding: float) -> None:
    found = difference(parts[owner], parts[rank], rounding) if rank != owner else None
    if found is not None:
        says = f"ranks {owner} and {rank} should hold the same value, but {found.says}"
        raise UnequalReplicasError(Difference(found.expected, found.actual, says))


def _equal_on_all(parts: Sequence[Any]) -> Any:
    for rank, part in enumerate(parts):
        found = difference(parts[0], part, 0.0)
        if found is not None:
            raise UnequalReplicasError(
                Difference(parts[0], part, f"rank 0 has {parts[0]!r}, but rank {rank} has {part!r}")
            )
    return parts[0]
