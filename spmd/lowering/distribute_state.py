"""Distribute live state over the mesh: make it equal to rank 0's, and split it as the plan places it.

Splitting a parameter means a new object: torch cannot turn a Parameter into a DTensor in place. The module's entry, the
optimizers' groups and state keys are rebound, and hooks, attributes and gradients move along. All of it happens after
everything that can fail has been done (``commit``), so that bad input changes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from passes import CaptureError, Input, Mesh, OutputKind, PlacementError, Program, Role
from passes.ir.program import Placements, is_sharded
from passes.runtime.gloo import GlooWork

from .._torch import local_tensor, move_hooks, set_local_tensor, tree_flatten, tree_unflatten
from ..call.call import Call
from ..call.state import Arguments, Slot, StateRef, local_of, parameters_of
from ..capture.effects.carried import Carried
from ..placements import chunk
from ..ranks.world import extend_placement

# What is rank 0's already, by id (tensors compare by value): optimizers, and this rank's parts of parameters, buffers
# and scalers' state. Nothing here refers to a DTensor weakly: torch could not convert it (``model.double()``) any more.
_equal: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_world: weakref.ref[Any] | None = None  # the process group in which that is so
# The attribute by which a parameter that was split leads to its replacement: optimizers of other steps may hold it.
_SUCCESSOR = "_spmd_successor"


@dataclass
class Prepared:
    """State that is about to be distributed: ``locals[k]`` is the storage that the program binds for slot k."""

    slots: list[Slot]
    placements: list[Placements]
    locals: list[torch.Tensor]


def prepare(call: Call, inputs: Sequence[Input]) -> Prepared:
    """The local storages of all state, as ``inputs`` place it; nothing live is changed yet."""
    slots, device_mesh = call.slots, call.device_mesh
    placements = [declared.placement for declared in inputs[: len(slots)]]
    storages = []
    for slot, placement in zip(slots, placements, strict=True):
        live = slot.get()
        if isinstance(live, DTensor):
            has = extend_placement(tuple(live.placements), live.device_mesh, device_mesh)
            if has != placement:
                raise PlacementError(
                    f"{slot.input.name} is a DTensor placed as {live.placements}, but the program needs {placement}"
                )
        fresh = is_sharded(placement) and not isinstance(live, DTensor)
        storages.append(part_of(live.detach(), placement, call.mesh) if fresh else local_tensor(live))
    return Prepared(slots, placements, storages)


def check_memory(program: Program, call: Call, carried: Carried) -> None:
    """Raise ``CaptureError`` if two inputs share memory and the step writes one of them: the other would not see it."""
    written = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
    named = [(slot.input.name, slot.local()) for slot in call.slots]
    named += [(leaf.name, local_of(leaf.value)) for leaf in call.arguments.tensors()]
    named += [(each.name, local_of(each.get())) for each in carried.tensors()]
    spans = sorted((*_span(tensor), name) for name, tensor in named if tensor.numel())
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end and (name in written or other in written):
            raise CaptureError(
                f"{name} and {other} share memory, and the step writes into it: pass one of them, or a clone"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor, and the one after its last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def part_of(tensor: torch.Tensor, placement: Placements, mesh: Mesh) -> torch.Tensor:
    """This rank's part, in storage of its own (the whole tensor's storage can go)."""
    for entry, axis in zip(placement, mesh.axes, strict=True):
        if isinstance(entry, Shard):
            tensor = tensor.narrow(entry.dim, *chunk(tensor.shape[entry.dim], axis.size, axis.coordinate))
    return tensor.clone(memory_format=torch.contiguous_format)


def commit(prepared: Prepared, call: Call) -> dict[str, weakref.ref[torch.Tensor]]:
    """Make state equal to rank 0's, and rebind what is split to DTensors.

    Returns the parameters that others took the place of, by name, unless the step takes such as arguments.
    """
    arguments, device_mesh = call.arguments, call.device_mesh
    _make_equal(prepared, call)
    renewed: dict[int, torch.Tensor] = {}
    replaced: dict[str, weakref.ref[torch.Tensor]] = {}
    for slot, placement, local in zip(prepared.slots, prepared.placements, prepared.locals, strict=True):
        live = slot.get()
        if not is_sharded(placement) or (isinstance(live, DTensor) and live.device_mesh == device_mesh):
            continue
        if not isinstance(live, DTensor):
            local.copy_(part_of(live.detach(), placement, call.mesh))
        split = as_dtensor(local, placement, device_mesh, live.shape, live.stride())
        if slot.input.role is Role.PARAMETER:
            new = renewed[id(live)] = _renewed(live, split)
            vars(live)[_SUCCESSOR], replaced[slot.input.name] = new, weakref.ref(live)
        elif slot.input.role is Role.GRADIENT:
            continue  # moves with its parameter, below
        else:
            slot.holder[slot.key] = split
    _split_gradients(prepared, renewed, device_mesh)
    _rebind(arguments, renewed)
    return {} if any(isinstance(leaf.value, StateRef) for leaf in arguments.leaves) else replaced


def make_kept_equal(carried: Carried, call: Call) -> None:
    """Make tensors in Python state that a program takes as inputs equal to those of rank 0."""
    for site in carried.sites if call.own_groups else ():
        leaves, spec = tree_flatten(site.get())
        equal = [_as_on_rank_zero(leaf, call) if type(leaf) is torch.Tensor else leaf for leaf in leaves]
        if any(new is not old for new, old in zip(equal, leaves, strict=True)):
            site.put(tree_unflatten(equal, spec))


def _as_on_rank_zero(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """The tensor, or a copy where rank 0 has other values: the user may hold it elsewhere, too."""
    values = tensor.clone()
    for axis in call.own_groups:
        broadcast_along(values, call, axis)
    return tensor if torch.equal(values, tensor) else values


def as_dtensor(
    local: torch.Tensor, placement: Placements, mesh: DeviceMesh, shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A DTensor over this rank's part, without communication."""
    tensor = DTensor.from_local(local, mesh, placement, run_check=False, shape=torch.Size(shape), stride=tuple(stride))
    set_local_tensor(tensor, local)
    return tensor


def _make_equal(prepared: Prepared, call: Call) -> None:
    """Broadcast from rank 0: the state of an optimizer when it is first seen, all other state once."""
    _forget_other_worlds()
    optimizers, mesh = call.arguments.optimizers.values(), call.device_mesh
    known = all(map(_is_equal, optimizers))
    with torch.no_grad():
        for slot in prepared.slots:
            if slot.input.name in call.annotations.ignored:
                continue
            live = slot.get()
            once = slot.input.role in (Role.PARAMETER, Role.BUFFER, Role.SCALER)
            if isinstance(live, DTensor):
                missing = live.device_mesh != mesh and not _is_equal(local_tensor(live))
                for axis in _axes_beyond(live, mesh) if missing else ():
                    broadcast_along(local_tensor(live), call, axis)
            elif not (_is_equal(live) if once else known or call.initial.holds(slot)):
                for axis in range(mesh.ndim):  # the first axis last to be split
                    broadcast_along(live.detach(), call, axis)
            if once:
                _note_equal(local_tensor(live))
    for optimizer in optimizers:
        _note_equal(optimizer)


def _forget_other_worlds() -> None:
    """What was rank 0's in a process group that is gone need not be what rank 0 of this one has."""
    global _world
    if _world is None or _world() is not dist.group.WORLD:
        _equal.clear()
        _world = weakref.ref(dist.group.WORLD)


def _is_equal(thing: Any) -> bool:
    return _equal.get(id(thing)) is thing


def _note_equal(thing: Any) -> None:
    _equal[id(thing)] = thing


def broadcast_along(tensor: torch.Tensor, call: Call, axis: int, source: int = 0) -> None:
    """Broadcast from the ``source``-th rank along an axis of the mesh to the others."""
    whole, group = tensor.contiguous(), call.own_groups.get(axis)
    if group is None:
        return
    if whole.device.type == "cpu":  # as counters of optimizers are, also where parameters are not
        GlooWork(dist.broadcast(whole, group_src=source, group=group, async_op=True)).wait()
    else:
        dist.broadcast(whole, group_src=source, group=call.device_mesh.get_group(axis))
    if whole is not tensor:
        tensor.copy_(whole)


def _axes_beyond(live: DTensor, mesh: DeviceMesh) -> list[int]:
    """The axes of ``mesh`` that the mesh of a DTensor does not have."""
    return [
        k for k, name in enumerate(mesh.mesh_dim_names or ()) if name not in (live.device_mesh.mesh_dim_names or ())
    ]


def _renewed(old: torch.Tensor, split: DTensor) -> torch.Tensor:
    """The DTensor Parameter that replaces ``old``, with its hooks and attributes."""
    new = nn.Parameter(split, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if name != _SUCCESSOR:
            new.__dict__.setdefault(name, value)
    move_hooks(old, new)
    return new


def _split_gradients(prepared: Prepared, renewed: dict[int, torch.Tensor], mesh: DeviceMesh) -> None:
    for slot, placement, local in zip(prepared.slots, prepared.placements, prepared.locals, strict=True):
        if slot.input.role is Role.GRADIENT:
            parameter = slot.holder.holder[slot.holder.key]
            gradient = slot.get()
            if id(parameter) in renewed and is_sharded(placement):
                split = as_dtensor(local, placement, mesh, gradient.shape, gradient.stride())
                renewed[id(parameter)].grad = split


def rebind_replaced_parameters(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Rebind optimizers to the parameters that replaced theirs when another step split the model."""
    for optimizer in optimizers.values():
        old = [p for group in optimizer.param_groups for p in group["params"]]
        renewed = {id(p): vars(p)[_SUCCESSOR] for p in old if _SUCCESSOR in vars(p)}
        if renewed:
            _rebind_optimizer(optimizer, renewed)


def _rebind(arguments: Arguments, renewed: dict[int, torch.Tensor]) -> None:
    if not renewed:
        return
    for parameter in parameters_of(arguments.modules):
        new = renewed.get(id(parameter.tensor))
        if new is not None:
            for holder, key in parameter.holders:
                holder[key] = new
    for optimizer in arguments.optimizers.values():
        _rebind_optimizer(optimizer, renewed)


def _rebind_optimizer(optimizer: torch.optim.Optimizer, renewed: dict[int, torch.Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [renewed.get(id(p), p) for p in group["params"]]
    entries = [(renewed.get(id(p), p), values) for p, values in optimizer.state.items()]
    optimizer.state.clear()
    optimizer.state.update(entries)
