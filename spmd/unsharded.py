"""``spmd.unshard``: look at a sharded model, use it or edit it as the plain model that it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from passes import SpmdError

from ._torch import get_proxy_mode, local_tensor, own_buffers, own_parameters
from .lowering.distribute_state import part_of
from .ranks.world import describe

_whole: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules that are unsharded now


@dataclass
class _Entry:
    """One sharded tensor of the model, everywhere that it is held, and the whole one in its place (None elsewhere)."""

    sharded: DTensor
    holders: list[tuple[dict[str, Any], str]]
    whole: torch.Tensor | None


@contextmanager
def unshard(
    module: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    recurse: bool = True,
) -> Iterator[None]:
    """Inside of the context ``module`` is a plain model again, with whole parameters and buffers; all ranks enter it.

    Names, order, ties and ``requires_grad`` are those of the plain model, so that ``model(x)``, ``model.generate``, an
    export or an edit work as without ``spmd``. At the end every rank writes its edits to its own shards.

    - ``writeback``: False drops the edits.
    - ``rank0_only``: only the first rank of the mesh has whole tensors; its edits reach the shards of all ranks.
    - ``offload_to_cpu``: the whole tensors are on the CPU.
    - ``with_grads``: ``.grad`` is whole, too, and edits of it are written back.
    - ``recurse``: False takes the module's own tensors only, not those of its children.

    If the block raises on any rank, nothing is written back. Raises ``SpmdError`` inside of a step that is being
    compiled, and for a module of which a part is unsharded already.
    """
    modules = list(module.modules()) if recurse else [module]
    _check(modules)
    entries = _entries(modules)
    has_whole = not rank0_only or all(_is_first(entry.sharded.device_mesh) for entry in entries)
    _show(entries, has_whole, offload_to_cpu, with_grads)
    _whole.update(modules)
    done = False
    try:
        yield
        done = True
    finally:
        for entry in entries:
            _put(entry, entry.sharded)
        _whole.difference_update(modules)
        if writeback and entries and _all_done(done, [entry.sharded.device_mesh for entry in entries]):
            for entry in entries:
                _write_back(entry, rank0_only, with_grads)


def check_is_sharded(modules: Iterable[nn.Module]) -> None:
    """Raise ``SpmdError`` if one of these modules is unsharded now: a compiled step cannot train it then."""
    if _whole and any(each in _whole for module in modules for each in module.modules()):
        raise SpmdError("a compiled step was called inside of spmd.unshard: leave that block first")


def _check(modules: list[nn.Module]) -> None:
    if get_proxy_mode() is not None:
        raise SpmdError("spmd.unshard was called inside of a compiled step, where parameters are whole already")
    if any(each in _whole for each in modules):
        raise SpmdError("a part of this module is unsharded already: do not nest spmd.unshard")


def _entries(modules: list[nn.Module]) -> list[_Entry]:
    """The sharded tensors of these modules, tied ones once, in the order of the model."""
    found: dict[int, _Entry] = {}
    for each in modules:
        for holder in (own_parameters(each), own_buffers(each)):
            for key, tensor in holder.items():
                if isinstance(tensor, DTensor):
                    found.setdefault(id(tensor), _Entry(tensor, [], None)).holders.append((holder, key))
    return list(found.values())


def _show(entries: list[_Entry], has_whole: bool, offload_to_cpu: bool, with_grads: bool) -> None:
    """Gather all tensors, one after the other, and put the whole ones in their places where this rank has them."""
    for entry in entries:
        whole = _gathered(entry.sharded, offload_to_cpu)
        gradient = entry.sharded.grad
        whole_gradient = _gathered(gradient, offload_to_cpu) if with_grads and gradient is not None else None
        if has_whole:
            is_parameter = isinstance(entry.sharded, nn.Parameter)
            entry.whole = nn.Parameter(whole, entry.sharded.requires_grad) if is_parameter else whole
            entry.whole.grad = whole_gradient
    for entry in entries:
        if entry.whole is not None:
            _put(entry, entry.whole)


def _gathered(tensor: torch.Tensor, offload_to_cpu: bool) -> torch.Tensor:
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole.clone()
    return whole.cpu() if offload_to_cpu else whole


def _put(entry: _Entry, tensor: torch.Tensor) -> None:
    for holder, key in entry.holders:
        holder[key] = tensor


def _write_back(entry: _Entry, rank0_only: bool, with_grads: bool) -> None:
    with torch.no_grad():
        _write(entry.sharded, entry.whole, rank0_only)
        if with_grads and isinstance(entry.sharded.grad, DTensor):
            _write(entry.sharded.grad, None if entry.whole is None else entry.whole.grad, rank0_only)


def _write(sharded: DTensor, whole: torch.Tensor | None, rank0_only: bool) -> None:
    """Write this rank's part of ``whole``, or of what the first rank has, to the shard."""
    mesh, local = sharded.device_mesh, local_tensor(sharded)
    values = torch.empty(sharded.shape, dtype=sharded.dtype, device=local.device) if whole is None else whole.detach()
    values = values.to(local.device).contiguous()
    for axis in range(mesh.ndim) if rank0_only else ():
        dist.broadcast(values, group_src=0, group=mesh.get_group(axis))
    local.copy_(part_of(values, tuple(sharded.placements), describe(mesh)))


def _is_first(mesh: DeviceMesh) -> bool:
    return not any(mesh.get_coordinate() or ())


def _all_done(done: bool, meshes: list[DeviceMesh]) -> bool:
    """Whether the block ended well on all ranks that hold the shards."""
    flag = torch.tensor(int(done), device=meshes[0].device_type)
    for mesh in dict.fromkeys(meshes):
        for axis in range(mesh.ndim):
            dist.all_reduce(flag, dist.ReduceOp.MIN, mesh.get_group(axis))
    return bool(flag)
