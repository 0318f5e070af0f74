"""The mesh of all ranks: an existing process group, torchrun's environment, or a world of one that opens no port."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import Replicate

import passes
from passes.ir.program import Placements

from .._torch import FakeStore, gloo_of_one_worker, merged_axes, root_mesh
from .simulated import simulated

_Meshes = weakref.WeakValueDictionary[str, DeviceMesh]  # by kind of device
# By process group. A mesh holds its groups, so it is held by programs, by state and by the user, and not here.
_meshes: weakref.WeakKeyDictionary[Any, _Meshes] = weakref.WeakKeyDictionary()
_subgroups: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()  # by process group, and size


def world(device: str | torch.device | None = None) -> DeviceMesh:
    """The 1-D mesh of all ranks, named ``("dp",)``.

    An existing default process group is used as it is. Else one is made: from torchrun's environment if there is one
    (gloo on CPU, NCCL on CUDA), else a world of one rank, which opens no network port.

    ``device``: where the mesh's tensors live, ``"cpu"`` or ``"cuda"``; by default CUDA if the process group is NCCL's.
    """
    kind = _device_type(device)
    if not dist.is_initialized():
        _init(kind)
    meshes = _meshes.setdefault(dist.group.WORLD, weakref.WeakValueDictionary())
    mesh = meshes.get(kind)
    if mesh is None:
        mesh = meshes[kind] = DeviceMesh(kind, torch.arange(dist.get_world_size()), mesh_dim_names=("dp",))
    return mesh


def as_mesh(given: Any) -> DeviceMesh | None:
    """A mesh as it is, and a process group as a mesh of one axis. Raises ``TypeError`` for anything else but None."""
    if isinstance(given, dist.ProcessGroup):
        return DeviceMesh.from_group(given, _device_of(given), mesh_dim_names=("dp",))
    if given is not None and not isinstance(given, DeviceMesh):
        raise TypeError(f"expected mesh to be a torch DeviceMesh, a ProcessGroup or None, got {given!r}")
    return given


def describe(mesh: DeviceMesh) -> passes.Mesh:
    """Describe a mesh as the plain data that programs carry."""
    coordinate, stands_for = coordinate_on(mesh), simulated()
    names = axis_names(mesh)
    groups = [mesh.get_group(k) for k in range(mesh.ndim)]
    backends = [stands_for.backend if stands_for else _backend(group, mesh.device_type) for group in groups]
    axes = [
        passes.Axis(name, mesh.size(k), group.group_name, coordinate[k], backend)
        for k, (name, group, backend) in enumerate(zip(names, groups, backends, strict=True))
    ]
    if stands_for and stands_for.shared:
        axes = [replace(axis, shared=axis.size > 1) for axis in axes]
    return passes.Mesh(tuple(axes))


def coordinate_on(mesh: DeviceMesh) -> tuple[int, ...]:
    """The position of this rank along each axis. Raises ``ValueError`` where it is no rank of ``mesh``."""
    stands_for = simulated()
    if stands_for is None:
        coordinate, rank = mesh.get_coordinate(), dist.get_rank()
    else:
        rank = stands_for.rank
        coordinate = next(iter((mesh.mesh == rank).nonzero().tolist()), None)
    if coordinate is None:
        raise ValueError(f"this rank ({rank}) is not part of the mesh {mesh}")
    return tuple(coordinate)


def ranks_of_part(group: Any, size: int) -> list[int]:
    """The ``size`` ranks of ``group`` that follow each other and that this one is among."""
    first = group.rank() // size * size
    return dist.get_process_group_ranks(group)[first : first + size]


def subgroup_of(group: Any, size: int) -> Any:
    """The process group of these ranks, made when it is first asked for, with the backend of ``group``."""
    made = _subgroups.setdefault(group, {})
    if size not in made:
        ranks, backend = ranks_of_part(group, size), dist.get_backend(group)
        made[size] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return made[size]


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of the axes of ``mesh``; by number where it has none."""
    return mesh.mesh_dim_names or tuple(f"axis{k}" for k in range(mesh.ndim))


def joined(mesh: DeviceMesh, others: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh that has the axes of ``mesh`` and of ``others``: the one that all of them are parts of.

    Raises ``PlacementError`` if there is none, or where ``mesh`` has an axis that this one has not.
    """
    if all(other == mesh for other in others):
        return mesh
    whole = root_mesh(mesh)
    strangers = [other for other in others if root_mesh(other) != whole]
    if strangers:
        raise passes.PlacementError(
            f"some parameters are DTensors on {strangers[0]}, but the step runs on {mesh}: give the mode the same "
            "mesh, or make both parts of one mesh, as mesh['dp'] and mesh['tp'] are"
        )
    flattened = [name for name in axis_names(mesh) if name not in axis_names(whole)]
    if flattened:
        raise passes.PlacementError(
            f"the step runs over {flattened[0]!r}, which is no axis of {whole}, where some parameters are split: give "
            "the mode that mesh, and name its axes"
        )
    apart = [other for other in others if not {*axis_names(other)} <= {*axis_names(whole)}]
    if apart:
        raise passes.PlacementError(
            f"some parameters are DTensors on {apart[0]}, of which {whole} has not all axes: give the mode the mesh "
            "that they are on, or parameters that are not split yet"
        )
    return whole


def with_one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """``mesh`` with the axes ``names`` as one, which is named by them (``dp_ep``); a mesh that has it stays as it is.

    Raises ``PlacementError`` unless they follow each other in the mesh, in this order.
    """
    name, every = "_".join(names), axis_names(mesh)
    if not names or name in every:
        return mesh
    at = every.index(names[0]) if names[0] in every else 0
    if mesh.mesh_dim_names is None or every[at : at + len(names)] != names:
        raise passes.PlacementError(
            f'expected the axes with the role "experts", {", ".join(names)}, to follow each other in the mesh in this '
            f"order, got the axes {list(every)}: order the mesh so, or make one mesh axis of them"
        )
    return merged_axes(mesh, names, name)


def extend_placement(placement: Placements, mesh: DeviceMesh, whole: DeviceMesh) -> Placements:
    """Extend a placement on ``mesh`` to the mesh that it is a part of: replicated over the other axes."""
    names = mesh.mesh_dim_names or ()
    if mesh == whole or not names:
        return placement
    by_name = dict(zip(names, placement, strict=True))
    return tuple(by_name.get(name, Replicate()) for name in whole.mesh_dim_names or ())


def check_fits(mesh: DeviceMesh) -> None:
    """Raise ``ValueError`` if the mesh is larger than the world."""
    ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if mesh.size() > ranks:
        raise ValueError(
            f"the mesh has {mesh.size()} ranks, but the world has {ranks}: use a smaller mesh, or more ranks"
        )


def _backend(group: Any, device_type: str) -> str:
    """The backend of ``group`` for tensors of this device; torch writes them as ``"cpu:gloo,cuda:nccl"``."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type, "")


def _device_type(device: str | torch.device | None) -> str:
    if device is not None:
        return torch.device(device).type
    if dist.is_initialized():
        return _device_of(None)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _device_of(group: dist.ProcessGroup | None) -> str:
    return "cuda" if "nccl" in dist.get_backend(group) else "cpu"


def _init(kind: str) -> None:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with gloo_of_one_worker():  # with two, torch corrupts memory
            _init_from_environment("nccl" if kind == "cuda" else "gloo")
    else:
        # The fake backend moves no data, and at world size one there is none to move; it opens no port.
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())


def _init_from_environment(backend: str) -> None:
    """Make torchrun's process group, after a restart with keys of its own.

    ``torchrun --max-restarts`` keeps its store, and in it the addresses of the ranks before: torch's ranks may read
    these, and wait for half an hour (or what ``timeout`` they have) for connections that nobody accepts any more.
    """
    if restarts() == "0":
        return dist.init_process_group(backend)
    store, rank, size = next(rendezvous("env://"))
    store = dist.PrefixStore(f"spmd/restart-{restarts()}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def restarts() -> str:
    """The number of torchrun's restarts, by which keys in its store differ; "0" where that is not known.

    Each node counts restarts by itself, so that only those of a single node are surely equal on all ranks.
    """
    has_one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if has_one_node else "0"
