"""The rank of a process among those that pass different rows, for a sampler."""

from __future__ import annotations

from passes import AxisRole

from ..ranks.world import axis_names, world
from .base import ParallelMode


def data_rank(mode: ParallelMode) -> tuple[int, int]:
    """The index and the number of the ranks that pass different rows under ``mode``, for a sampler.

    Ranks that differ along other axes alone, such as that of a sequence, have one index and pass equal rows. Raises
    ``PlacementError`` if ``axes`` of the mode names an axis that its mesh has not.
    """
    mesh = mode.mesh if mode.mesh is not None else world()
    names, index, count = axis_names(mesh), 0, 1
    roles = mode.axis_roles(names)
    for k, name in enumerate(names):
        if AxisRole.BATCH in roles.get(name, ()):
            index, count = index * mesh.size(k) + mesh.get_local_rank(k), count * mesh.size(k)
    return index, count
