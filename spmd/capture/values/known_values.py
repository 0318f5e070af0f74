"""Known values: tensors whose values can be computed while tracing, from no input and no random draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.analysis.reachability import ancestors
from passes.ir.effects import is_random

from ..._torch import disable_modes, get_proxy_mode
from ..provenance import proxy_node
from ..state_branches import extract, own_constants, with_writes

aten = torch.ops.aten
_LARGEST = 1 << 22  # elements of a value that is worth computing


def known_value(tensor: Tensor) -> Tensor | None:
    """The value of a traced tensor, or None if it is known only when the program runs."""
    mode = get_proxy_mode()
    node = proxy_node(tensor, mode.tracer) if mode is not None else None
    if mode is None or node is None or tensor.numel() > _LARGEST:
        return None
    needed = ancestors([node])
    if any(each.op == "placeholder" for each in needed):
        return None
    needed = with_writes(needed)
    constants = own_constants(needed, mode)
    if any(each.op != "call_function" or is_random(each) for each in needed - constants.keys()):
        return None
    with disable_modes(), torch.no_grad():
        value: Tensor = extract(node, needed, list(constants))(*(each.clone() for each in constants.values()))
    return value


def known_numbers() -> dict[Any, Any]:
    """Decompositions of the ops that convert tensors to Python numbers or bools: known values become constants."""
    return {aten._local_scalar_dense.default: _number, aten.equal.default: _equal}


def _number(tensor: Tensor) -> Any:
    value = known_value(tensor)
    if value is None:
        return NotImplemented
    with disable_modes():
        return value.item()


def _equal(one: Tensor, other: Tensor) -> Any:
    """``quantile`` of torch 2.11 checks so that its number lies between 0 and 1."""
    values = known_value(one), known_value(other)
    if values[0] is None or values[1] is None:
        return NotImplemented
    with disable_modes():
        return torch.equal(values[0], values[1])


def is_range(tensor: Tensor, step: int) -> bool:
    """Whether the value of ``tensor`` is known to be 0, ``step``, 2 * ``step``, ..."""
    value = known_value(tensor)
    if value is None or value.ndim != 1:
        return False
    with disable_modes(), torch.no_grad():
        return bool((value == step * torch.arange(len(value), device=value.device)).all())
