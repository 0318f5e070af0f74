"""When two calls are the same program: everything that tracing took for granted, as one hashable key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from passes import CaptureError, Role

from .state import Arguments, Leaf, Slot, submodules_of

_LIVE = (float, torch.Tensor)  # in a parameter group: read at each call


def signature(arguments: Arguments, slots: Sequence[Slot]) -> tuple[Any, ...]:
    """The key of a call. Raises ``CaptureError`` for an argument that cannot be compared from call to call."""
    names = {id(slot.get()): slot.input.name for slot in slots if slot.input.role is Role.PARAMETER}
    return (
        arguments.spec,
        tuple(_leaf(leaf) for leaf in arguments.leaves),
        tuple(_slot(slot) for slot in slots),
        tuple(module.training for _, module in submodules_of(arguments.modules)),
        tuple(_groups(optimizer, names) for optimizer in arguments.optimizers.values()),
        torch.is_grad_enabled(),
        tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
        ),
        torch.get_default_dtype(),
    )


def _leaf(leaf: Leaf) -> Any:
    value = leaf.value
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype, value.device, value.requires_grad)
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        return id(value)
    try:
        hash(value)
    except TypeError:
        raise CaptureError(
            f"the argument {leaf.name} is a {type(value).__name__}, which cannot be compared from call to call: pass "
            "tensors, modules, optimizers, hashable values, or lists, tuples and dicts of them"
        ) from None
    return (type(value), value)


def _slot(slot: Slot) -> Any:
    tensor = slot.get()
    return (slot.input.name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Any:
    """Which parameter is in which group with which flags, and the state that is no tensor."""
    state = tuple(
        (key, _constant(value))
        for values in optimizer.state.values()
        for key, value in values.items()
        if not isinstance(value, torch.Tensor)
    )
    return state, tuple(_group(group, names) for group in optimizer.param_groups)


def _group(group: dict[str, Any], names: dict[int, str]) -> Any:
    flags: list[tuple[str, Any]] = [("params", tuple(names[id(parameter)] for parameter in group["params"]))]
    for key, value in group.items():
        if key == "params":
            continue
        values = value if isinstance(value, (tuple, list)) else (value,)
        flags.append((key, tuple("live" if isinstance(v, _LIVE) else _constant(v) for v in values)))
    return tuple(flags)


def _constant(value: Any) -> Any:
    """A Python value that the trace took as it was."""
    try:
        hash(value)
    except TypeError:
        return (type(value), repr(value))
    return (type(value), value)
