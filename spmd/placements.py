"""Placements as users write them, made uniform: a tuple with one placement per mesh axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes import Mesh, PlacementError
from passes.program import Placements

AnyPlacement = Placement | Sequence[Placement] | Mapping[str, Placement]


def normalize(placement: Any, mesh: Mesh, name: str) -> Placements:
    """One placement for a 1-D mesh, a list with one per axis, or a dict by axis name (axes left out are replicated).

    Raises ``PlacementError`` for anything else; ``name`` says whose placement it is.
    """
    axes = [axis.name for axis in mesh.axes]
    if isinstance(placement, Mapping):
        unknown = sorted(set(placement) - set(axes))
        if unknown:
            raise PlacementError(f"the placement of {name} names the mesh axes {unknown}; the mesh has {axes}")
        given = [placement.get(axis, Replicate()) for axis in axes]
    elif isinstance(placement, Placement):
        given = [placement]
    elif isinstance(placement, Sequence) and not isinstance(placement, str):
        given = list(placement)
    else:
        raise PlacementError(f"expected a placement for {name} (Shard, Replicate, Partial), got {placement!r}")
    if len(given) != len(axes):
        raise PlacementError(
            f"the placement of {name} has {len(given)} entries, but the mesh has {len(axes)} axes {axes}: "
            "give one placement per axis, or a dict from axis name to placement"
        )
    for entry in given:
        if not isinstance(entry, (Shard, Replicate, Partial)):
            raise PlacementError(f"expected Shard, Replicate or Partial for {name}, got {entry!r}")
    return tuple(given)


def check_dims(placement: Placements, ndim: int, name: str) -> Placements:
    """Raise ``PlacementError`` if a split dim does not exist; negative dims become positive."""
    checked: list[Placement] = []
    for entry in placement:
        if isinstance(entry, Shard):
            dim = entry.dim + ndim if entry.dim < 0 else entry.dim
            if not 0 <= dim < ndim:
                raise PlacementError(f"{name} has {ndim} dims, so it cannot be split along dim {entry.dim}")
            entry = Shard(dim)
        checked.append(entry)
    return tuple(checked)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part ``index`` when ``size`` is cut as ``torch.chunk`` cuts; trailing parts may be empty."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(step, size - start)


def local_shape(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """This rank's part of a global shape."""
    local = list(shape)
    for entry, axis in zip(placement, mesh.axes, strict=True):
        if isinstance(entry, Shard):
            local[entry.dim] = chunk(local[entry.dim], axis.size, axis.coordinate)[1]
    return tuple(local)


def local_start(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """Where this rank's part of a global shape starts, along each dim."""
    local, starts = list(shape), [0] * len(shape)
    for entry, axis in zip(placement, mesh.axes, strict=True):
        if isinstance(entry, Shard):
            start, local[entry.dim] = chunk(local[entry.dim], axis.size, axis.coordinate)
            starts[entry.dim] += start
    return tuple(starts)


def global_shape(shape: Sequence[int], placement: Placements, mesh: Mesh) -> tuple[int, ...]:
    """The global shape of which every rank has an equal part of this shape."""
    full = list(shape)
    for entry, axis in zip(placement, mesh.axes, strict=True):
        if isinstance(entry, Shard):
            full[entry.dim] *= axis.size
    return tuple(full)
