"""A world of simulated ranks: one process stands for each of them in turn; no data moves, and no port is opened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch import FakeStore, process_groups_set_aside
from ..ranks.world import as_mesh
from ..ranks.world import world as mesh_of_world

AnyMesh = DeviceMesh | Mapping[str, int] | None


def check_mesh(mesh: Any, world: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what is no mesh, or not one of ``world`` ranks."""
    if isinstance(world, bool) or not isinstance(world, int):
        raise TypeError(f"expected world to be a number of ranks, got {world!r}")
    if world < 1:
        raise ValueError(f"expected world to be 1 rank or more, got {world}")
    if mesh is not None and not isinstance(mesh, (DeviceMesh, Mapping)):
        raise TypeError(f"expected mesh to be a DeviceMesh or a dict such as {{'dp': 2, 'tp': 2}}, got {mesh!r}")
    if mesh is not None and _size_of(mesh) != world:
        raise ValueError(f"the mesh has {_size_of(mesh)} ranks, but world={world}: give both the same number")


def _size_of(mesh: DeviceMesh | Mapping[str, int]) -> int:
    return mesh.size() if isinstance(mesh, DeviceMesh) else math.prod(mesh.values())


@contextmanager
def simulated_world(world: int, mesh: AnyMesh, kind: str) -> Iterator[DeviceMesh]:
    """A fake world of ``world`` ranks, as long as the body runs; gives its mesh.

    A fake world of this size that is there already is used as it is; all other process groups are set aside.
    """
    if dist.is_initialized() and dist.get_backend() == "fake" and dist.get_world_size() == world:
        yield _as_device_mesh(mesh, kind)
        return
    if isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"the mesh {mesh} belongs to process groups that are set aside while ranks are simulated: give its axes as "
            f"a dict, such as {{'dp': {world}}}"
        )
    with process_groups_set_aside():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        yield _as_device_mesh(mesh, kind)


def _as_device_mesh(mesh: AnyMesh, kind: str) -> DeviceMesh:
    if mesh is None:
        return mesh_of_world(kind)
    if isinstance(mesh, Mapping):
        sizes = tuple(mesh.values())
        return DeviceMesh(kind, torch.arange(math.prod(sizes)).view(sizes), mesh_dim_names=tuple(mesh))
    made = as_mesh(mesh)
    assert made is not None
    return made
