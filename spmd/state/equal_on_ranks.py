"""Make state equal to rank 0's: what ranks bring along, once, in buckets."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from passes import Role
from passes.runtime.gloo import GlooWork

from .._torch import local_tensor, tree_flatten, tree_unflatten
from ..call.call import Call
from ..call.state import Slot
from ..interpreter.interrupts import interruptible
from ..python_state.effects.carried import Carried

_LARGE = 1_000_000  # bytes from which a tensor is broadcast by itself, without a copy
_BUCKET = 25_000_000  # bytes of the broadcast of several
_ONCE = (Role.PARAMETER, Role.BUFFER, Role.SCALER)

# What is rank 0's already, by id (tensors compare by value): optimizers, and this rank's parts of parameters, buffers
# and scalers' state. Nothing here refers to a DTensor weakly: torch could not convert it (``model.double()``) any more.
_equal: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_world: weakref.ref[Any] | None = None  # the process group in which that is so


class EqualState:
    """The state of one call as it becomes rank 0's: that of an optimizer when it is first seen, all other once."""

    def __init__(self, call: Call) -> None:
        _forget_other_worlds()
        self.call, self.ignored = call, call.annotations.ignored
        self._optimizers = list(call.arguments.optimizers.values())
        self._known = all(map(_is_equal, self._optimizers))

    def make(self, slots: Sequence[Slot]) -> None:
        """Broadcast the state of these slots from rank 0, as far as it was not before."""
        if not self.call.mode.sync:
            return
        buckets: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for slot in slots:
            for tensor, axes in self._unequal(slot):
                buckets[axes, tensor.dtype, tensor.device].append(tensor)
        with torch.no_grad():
            for (axes, _, _), tensors in buckets.items():
                for bucket in _buckets(tensors):
                    self._broadcast(bucket, axes)
        for slot in slots:
            if slot.input.role in _ONCE and slot.input.name not in self.ignored:
                _note_equal(local_tensor(slot.get()))

    def finish(self) -> None:
        """Note that the state of all optimizers is rank 0's."""
        for optimizer in self._optimizers if self.call.mode.sync else ():
            _note_equal(optimizer)

    def _unequal(self, slot: Slot) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """The tensor of a slot that may differ between ranks, with the axes over which it may."""
        live, mesh = slot.get(), self.call.device_mesh
        if slot.input.name in self.ignored:
            return
        if isinstance(live, DTensor):
            if live.device_mesh != mesh and not _is_equal(local_tensor(live)):
                yield local_tensor(live), tuple(_axes_beyond(live, mesh))
        elif not (_is_equal(live) if slot.input.role in _ONCE else self._known or self.call.initial.holds(slot)):
            yield live.detach(), tuple(range(mesh.ndim))  # the first axis last to be split

    def _broadcast(self, tensors: Sequence[torch.Tensor], axes: Sequence[int]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0]
        for axis in axes:
            broadcast_along(flat, self.call, axis)
        if len(tensors) > 1:
            for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def make_kept_equal(carried: Carried, call: Call) -> None:
    """Make tensors in Python state that a program takes as inputs equal to those of rank 0."""
    for site in carried.sites if call.groups.own else ():
        leaves, spec = tree_flatten(site.get())
        equal = [_as_on_rank_zero(leaf, call) if type(leaf) is torch.Tensor else leaf for leaf in leaves]
        if any(new is not old for new, old in zip(equal, leaves, strict=True)):
            site.put(tree_unflatten(equal, spec))


@interruptible  # it waits for other ranks; a call that ends here reports its state as mixed
def broadcast_along(tensor: torch.Tensor, call: Call, axis: int, source: int = 0) -> None:
    """Broadcast from the ``source``-th rank along an axis of the mesh to the others."""
    whole, group = tensor.contiguous(), call.groups.own.get(axis)
    if group is None:
        return
    if whole.device.type == "cpu":  # as counters of optimizers are, also where parameters are not
        GlooWork(dist.broadcast(whole, group_src=source, group=group, async_op=True)).wait()
    else:
        dist.broadcast(whole, group_src=source, group=call.device_mesh.get_group(axis))
    if whole is not tensor:
        tensor.copy_(whole)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Large tensors by themselves, then the others together, up to ``_BUCKET`` bytes at a time."""
    yield from ([tensor] for tensor in tensors if tensor.nbytes >= _LARGE)
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.nbytes < _LARGE:
            if sum(each.nbytes for each in bucket) + tensor.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
    if bucket:
        yield bucket


def _as_on_rank_zero(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """The tensor, or a copy where rank 0 has other values: the user may hold it elsewhere, too."""
    values = tensor.clone()
    for axis in call.groups.own:
        broadcast_along(values, call, axis)
    return tensor if torch.equal(values, tensor) else values


def _forget_other_worlds() -> None:
    """Forget state of rank 0 of groups that are gone: rank 0 of this one may have other state."""
    global _world
    if _world is None or _world() is not dist.group.WORLD:
        _equal.clear()
        _world = weakref.ref(dist.group.WORLD)


def _is_equal(thing: Any) -> bool:
    return _equal.get(id(thing)) is thing


def _note_equal(thing: Any) -> None:
    _equal[id(thing)] = thing


def _axes_beyond(live: DTensor, mesh: DeviceMesh) -> list[int]:
    """The axes of ``mesh`` that the mesh of a DTensor does not have."""
    return [
        k for k, name in enumerate(mesh.mesh_dim_names or ()) if name not in (live.device_mesh.mesh_dim_names or ())
    ]
