"""Distribute live state over the mesh: make it equal to rank 0's, and split it as the plan places it.

All of it happens after everything that can fail has been done (``commit``), so that bad input changes nothing.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from passes import CaptureError, Input, Memory, Mesh, OutputKind, PlacementError, Program, Role
from passes.ir.program import Placements, is_sharded

from .._torch import dtensor_over, local_tensor
from ..call.call import Call
from ..call.state import Slot, local_of
from ..placements import OnStage, extent, local_shape
from ..python_state.effects.carried import Carried
from ..ranks.world import extend_placement
from .equal_on_ranks import EqualState
from .replace_parameters import rebind, replace_parameter
from .split_tensor import split


@dataclass
class Prepared:
    """State that is about to be distributed: each slot, with the placement and memory that the program needs it in.

    ``replaced``: the parameters that others have taken the place of since.
    """

    call: Call
    slots: list[Slot]
    placements: list[Placements]
    memories: list[Memory]
    replaced: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    _shown: dict[str, torch.Tensor] = field(default_factory=dict)  # storages that an override has seen, by name

    def locals(self) -> list[torch.Tensor]:
        """The storage that the program binds for each slot, with its values; nothing live is changed."""
        for slot, placement in zip(self.slots, self.placements, strict=True):
            self._shown[slot.input.name] = self.local(slot, placement)
        return list(self._shown.values())

    def storage(self, slot: Slot, placement: Placements) -> torch.Tensor:
        """The storage of one slot, with the values of now."""
        now, shown = self.local(slot, placement), self._shown.get(slot.input.name)
        return now if shown is None else shown.copy_(now)

    def local(self, slot: Slot, placement: Placements) -> torch.Tensor:
        """This rank's storage of one slot: what it is, or a copy of its part."""
        return self.in_memory(slot, local_storage(slot.get(), placement, self.call))

    def in_memory(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """``local`` where the slot is to live, if it is new: in host memory, pinned for a GPU to copy."""
        memory = self._memory[slot.input.name]
        if memory is Memory.DEVICE or self.call.device.type == "cpu" or local is local_tensor(slot.get()):
            return local
        return local.cpu().pin_memory() if memory is Memory.PINNED else local.cpu()

    @cached_property
    def _memory(self) -> dict[str, Memory]:
        return {slot.input.name: memory for slot, memory in zip(self.slots, self.memories, strict=True)}


def prepare(call: Call, inputs: Sequence[Input]) -> Prepared:
    """Check that all state can be placed as ``inputs`` say; nothing live is changed yet."""
    placements = [declared.placement for declared in inputs[: len(call.slots)]]
    for slot, placement in zip(call.slots, placements, strict=True):
        live = slot.get()
        if isinstance(live, DTensor):
            has = extend_placement(tuple(live.placements), live.device_mesh, call.device_mesh)
            if has != placement and has != _on_all_stages(placement):
                raise PlacementError(
                    f"{slot.input.name} is a DTensor placed as {live.placements}, but the program needs {placement}"
                )
    memories = [declared.memory for declared in inputs[: len(call.slots)]]
    return Prepared(call, call.slots, placements, memories)


def local_storage(live: torch.Tensor, placement: Placements, call: Call) -> torch.Tensor:
    """This rank's storage of a state tensor: what it is, or a copy of its part; zeros for one on the meta device."""
    if live.is_meta:
        return torch.zeros(local_shape(live.shape, placement, call.mesh), dtype=live.dtype, device=call.device)
    if is_sharded(placement) and not isinstance(live, DTensor):
        return part_of(live.detach(), placement, call.mesh)
    local = local_tensor(live)
    pairs = zip(placement, call.mesh.axes, strict=True)
    is_elsewhere = any(isinstance(entry, OnStage) and axis.coordinate not in entry.stages for entry, axis in pairs)
    if is_elsewhere and local.numel():
        return local.new_empty(local_shape(live.shape, placement, call.mesh))
    return local


def _on_all_stages(placement: Placements) -> Placements:
    """The placement of state before a step that trains it has given it to its stages: whole along their axis."""
    return tuple(Replicate() if isinstance(entry, OnStage) else entry for entry in placement)


def check_memory(program: Program, call: Call, carried: Carried, constants: Sequence[torch.Tensor] = ()) -> None:
    """Raise ``CaptureError`` if two inputs share memory and the step writes one of them: the other would not see it."""
    written = {output.name for output in program.outputs if output.kind is OutputKind.UPDATE}
    named = [(slot.input.name, slot.local()) for slot in call.slots]
    named += [(leaf.name, local_of(leaf.value)) for leaf in call.arguments.tensors()]
    named += [(each.name, local_of(each.get())) for each in carried.tensors()]
    named += [("another tensor that the step reads", local_of(each)) for each in constants]
    spans = sorted((*_span(tensor), name) for name, tensor in named if tensor.numel() and not tensor.is_meta)
    for k, (_, end, name) in enumerate(spans):
        for start, _, other in spans[k + 1 :]:
            if start >= end:
                break
            if name in written or other in written:
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
            tensor = tensor.narrow(entry.dim, *extent(entry, tensor.shape[entry.dim], axis))
    return tensor.clone(memory_format=torch.contiguous_format)


def commit(prepared: Prepared, units: Sequence[Sequence[str]]) -> None:
    """Make state equal to rank 0's, and rebind what is split: unit by unit, so that the whole ones can go."""
    equal = EqualState(prepared.call)
    for members in _by_unit(prepared, units):
        equal.make([slot for slot, _ in members])
        rebind(prepared.call.arguments, prepared.call.references, _split(members, prepared))
    equal.finish()


def _by_unit(prepared: Prepared, units: Sequence[Sequence[str]]) -> list[list[tuple[Slot, Placements]]]:
    """The slots with their placements: those of a unit's parameters together, else of one parameter, and all others."""
    unit_of = {name: k for k, names in enumerate(units) for name in names}
    groups: dict[Any, list[tuple[Slot, Placements]]] = defaultdict(list)
    for slot, placement in zip(prepared.slots, prepared.placements, strict=True):
        parameter = slot.input.name if slot.input.role is Role.PARAMETER else slot.input.of
        groups[unit_of.get(parameter or "", parameter)].append((slot, placement))
    return list(groups.values())


def _split(members: Sequence[tuple[Slot, Placements]], prepared: Prepared) -> dict[int, torch.Tensor]:
    """Split what is placed so and whole so far; returns the parameters that are new, by the id of the old one."""
    call, renewed = prepared.call, dict[int, torch.Tensor]()
    for slot, placement in members:
        live = slot.get()
        if not _is_whole(live, placement, call) or slot.input.role is Role.GRADIENT:
            continue
        split = as_dtensor(prepared.storage(slot, placement), placement, call.device_mesh, live.shape, live.stride())
        if slot.input.role is Role.PARAMETER:
            renewed[id(live)] = replace_parameter(live, split)
            prepared.replaced.append(weakref.ref(live))
        else:
            slot.put(split)
    for slot, placement in members:
        if slot.input.role is Role.GRADIENT and is_sharded(placement):  # it moves with its parameter
            parameter, gradient = slot.holder.holder[slot.holder.key], slot.get()
            if id(parameter) in renewed:
                local = prepared.storage(slot, placement)
                renewed[id(parameter)].grad = as_dtensor(
                    local, placement, call.device_mesh, gradient.shape, gradient.stride()
                )
    return renewed


def _is_whole(live: torch.Tensor, placement: Placements, call: Call) -> bool:
    """Whether a tensor is to be split over this mesh, and is not yet."""
    if isinstance(live, DTensor) and live.device_mesh == call.device_mesh and tuple(live.placements) == placement:
        return False
    return is_sharded(placement)


def as_dtensor(
    local: torch.Tensor, placement: Placements, mesh: DeviceMesh, shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """A DTensor over this rank's part, without communication."""
    return split(dtensor_over(local, mesh, placement, shape, stride))
