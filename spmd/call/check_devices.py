"""Check that state and arguments are on the devices of the mesh."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from passes import PlacementError, Role

from .inputs import BatchInput
from .state import Slot

_SHOWN = 20  # names
_WITH_THE_MODEL = (Role.PARAMETER, Role.BUFFER, Role.GRADIENT)  # counters of optimizers may stay on the CPU


def check_devices(
    mesh: DeviceMesh, slots: Sequence[Slot], inputs: Sequence[BatchInput], offloaded: Container[str] = ()
) -> None:
    """Raise ``PlacementError`` unless tensors are on one device of the mesh's kind; 0-dim ones may be on the CPU.

    Tensors on the meta device are made there later. ``offloaded``: parameters that live in host memory.
    """
    if mesh.device_type == "cuda" and not torch.cuda.is_available():
        raise PlacementError("the mesh is of cuda devices, but torch finds none here: take a mesh of cpu devices")
    with_the_model = [slot for slot in slots if slot.input.role in _WITH_THE_MODEL]
    on_device = [slot for slot in with_the_model if (slot.input.of or slot.input.name) not in offloaded]
    state = [(slot.input.name, slot.get()) for slot in on_device]
    tensors = [*state, *((each.name, each.value) for each in inputs)]
    found: dict[torch.device, list[str]] = {}
    for name, tensor in tensors:
        if not tensor.is_meta and not (tensor.ndim == 0 and tensor.device.type == "cpu"):
            found.setdefault(tensor.device, []).append(name)
    if any(device.type != mesh.device_type for device in found):
        raise PlacementError(
            f"the mesh is of {mesh.device_type} devices, but the call has {_listed(found)}. Move the model and its "
            f"arguments there, or take a mesh of the devices that they are on"
        )
    if len(found) > 1:
        raise PlacementError(f"expected all tensors of a call on one device, but it has {_listed(found)}")


def check_offloaded(slots: Sequence[Slot], offloaded: Container[str]) -> None:
    """Raise ``PlacementError`` for state that is to live in host memory, and is on a device."""
    for slot in slots:
        where, name = slot.local().device, slot.input.of or slot.input.name
        if name in offloaded and where.type not in ("cpu", "meta"):
            raise PlacementError(
                f"{slot.input.name} is on {where}, but {name} has an offload policy, which keeps it in host memory: "
                "move the model to the CPU before the first step, as model.cpu() does"
            )


def _listed(found: dict[torch.device, list[str]]) -> str:
    def names(given: list[str]) -> str:
        more = f" and {len(given) - _SHOWN} more" if len(given) > _SHOWN else ""
        return ", ".join(given[:_SHOWN]) + more

    return " and ".join(f"{names(given)} on {device}" for device, given in found.items())
