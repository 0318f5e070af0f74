"""Master copies between calls: each rank's exact part of the parameters that all ranks hold as they were sent, rounded.

``gather_dtype`` with ``shard_optimizer`` rounds what ranks send each other. A model then holds what was sent, equal on
all ranks, and the part that a rank updates, exact, lies here: by parameter, for all programs that train it. Whatever
shows a parameter to others (a checkpoint, ``spmd.state_dict``, ``spmd.unshard``) shows ``exact``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from passes import Input, OutputKind, Program, Role
from passes.ir.program import Placements, replicated
from passes.runtime.master_copies import current, sent

from .._torch import local_tensor
from ..call.call import Call
from ..placements import extent, left_to_cut
from ..ranks.simulated import simulated
from ..ranks.world import describe, extend_placement
from .distribute import as_dtensor, part_of


@dataclass(frozen=True)
class Master:
    """This rank's part of a parameter of this ``shape``, and the dtype in which it is sent.

    ``world``: the process group of all ranks.
    """

    values: torch.Tensor
    shape: torch.Size
    placement: Placements
    mesh: DeviceMesh
    wire: torch.dtype
    world: weakref.ref[Any] | None

    @classmethod
    def of(cls, parameter: torch.Tensor, declared: Input, mesh: DeviceMesh) -> Master:
        """The master copy of a parameter as it is."""
        assert declared.wire is not None, "a master copy is of what is sent rounded"
        part = _part_of(parameter, declared.placement, mesh)
        values = part.clone(memory_format=torch.contiguous_format)
        return cls(values, parameter.shape, declared.placement, mesh, declared.wire, _world())

    def fits(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is still what it was, among ranks that are still there."""
        here, is_same = _world(), (parameter.dtype, parameter.shape) == (self.values.dtype, self.shape)
        return is_same and (self.world and self.world()) is (here and here())

    def is_for(self, declared: Input, mesh: DeviceMesh) -> bool:
        """Whether a program takes it as this input."""
        return (self.placement, self.mesh, self.wire) == (declared.placement, mesh, declared.wire)

    def exact(self, parameter: torch.Tensor) -> DTensor:
        """The parameter, exact, split as ranks update it; it lies in the master copy where nobody wrote to it since."""
        held = _part_of(parameter, self.placement, self.mesh).to(self.values.device)
        is_current = torch.equal(held, sent(self.values, self.wire))
        values = self.values if is_current else current(self.values, held, self.wire)
        return as_dtensor(values, self.placement, self.mesh, parameter.shape, parameter.stride())

    @torch.no_grad()
    def take(self, parameter: torch.Tensor) -> None:
        """Take over the values of a parameter, which from now on holds what would be sent of them."""
        self.values.copy_(_part_of(parameter, self.placement, self.mesh))
        local = local_tensor(parameter.detach())
        local.copy_(sent(local, self.wire))


def _part_of(parameter: torch.Tensor, placement: Placements, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a parameter as it is held, which other axes may have split: a view of what it has."""
    local, entries = local_tensor(parameter.detach()), placement
    if isinstance(parameter, DTensor):
        has = extend_placement(tuple(parameter.placements), parameter.device_mesh, mesh)
        entries = left_to_cut(has, placement)
    for entry, axis in zip(entries, describe(mesh).axes, strict=True):
        if isinstance(entry, Shard):
            local = local.narrow(entry.dim, *extent(entry, local.shape[entry.dim], axis))
    return local


_masters: dict[int, tuple[weakref.ref[torch.Tensor], Master]] = {}  # by the id of the rank's storage


def bind(call: Call, program: Program) -> dict[str, torch.Tensor]:
    """The master copies that a program takes, by input name: those that are there, or new ones."""
    slots = {slot.input.name: slot for slot in call.slots}
    found = {}
    for declared in program.inputs:
        if declared.role is Role.MASTER:
            parameter = slots[declared.of or ""].get()
            master = _of(parameter)
            if master is None or not master.is_for(declared, call.device_mesh):
                master = Master.of(parameter, declared, call.device_mesh)
                master.take(parameter)
                _keep(parameter, master)
            found[declared.name] = master.values
    return found


def put_back(call: Call, program: Program) -> None:
    """Make parameters whole and exact again that a program updates or splits without the master copies that there are.

    All ranks call it. A simulated rank has no others to ask, and goes on with what was sent.
    """
    if simulated():
        return
    taken = {declared.of: declared for declared in program.inputs if declared.role is Role.MASTER}
    updated = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
    placed = {declared.name: declared for declared in _declared(program)}
    for slot in call.slots:
        declared = placed.get(slot.input.name)
        if declared is None or slot.input.role is not Role.PARAMETER:
            continue
        if (own := taken.get(slot.input.name)) is not None:
            master = _of(slot.get())
            if master is not None and not master.is_for(own, call.device_mesh):
                _put_back(slot.get(), call)
        elif declared.in_place or declared.name in updated or declared.placement != _placement(slot.get(), call):
            _put_back(slot.get(), call)


def _put_back(parameter: torch.Tensor, call: Call) -> None:
    master = _of(parameter)
    if master is not None:
        values, placement = master.exact(parameter).full_tensor(), _placement(parameter, call)
        local_tensor(parameter.detach()).copy_(part_of(values, placement, describe(call.device_mesh)))
        master.values.fill_(torch.nan)  # which no parameter has: what this one has from now on counts


def _placement(parameter: torch.Tensor, call: Call) -> Placements:
    if not isinstance(parameter, DTensor):
        return replicated(call.mesh)
    return extend_placement(tuple(parameter.placements), parameter.device_mesh, call.device_mesh)


def _declared(program: Program) -> Iterator[Input]:
    for declared in program.inputs:
        yield from declared.inside


def exact(parameter: torch.Tensor) -> DTensor | None:
    """The exact values of a parameter that ranks hold rounded, split as they update it; None for any other."""
    master = _of(parameter)
    return None if master is None else master.exact(parameter)


def take(parameter: torch.Tensor) -> None:
    """Let a master copy, where there is one, be what was just written to its parameter, on all ranks."""
    master = _of(parameter)
    if master is not None:
        master.take(parameter)


def _of(parameter: torch.Tensor) -> Master | None:
    local = local_tensor(parameter)
    reference, master = _masters.get(id(local), (None, None))
    if master is None or reference is None or reference() is not local or not master.fits(parameter):
        return None
    return master


def _keep(parameter: torch.Tensor, master: Master) -> None:
    """Refer to the rank's storage: a DTensor with weak references could not be converted (``model.double()``)."""
    local = local_tensor(parameter)
    key = id(local)
    _masters[key] = weakref.ref(local, lambda _: _masters.pop(key, None)), master


def _world() -> weakref.ref[Any] | None:
    return weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
