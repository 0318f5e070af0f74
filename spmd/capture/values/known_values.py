"""Known values: tensors whose values can be computed while tracing, from no input and no random draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from passes.analysis.reachability import ancestors
from passes.ir.effects import is_random
from passes.ir.ops import Trait, has

from ..._torch import FakeTensor, disable_modes, get_proxy_mode
from ..provenance import proxy_node
from ..state_branches import extract, own_constants, with_writes

aten = torch.ops.aten
_LARGEST = 1 << 22


def known_value(tensor: Tensor, largest: int = _LARGEST) -> Tensor | None:
    """The value of a traced tensor, or None if it is known only when the program runs.

    ``largest``: elements of a value that is worth computing.
    """
    mode = get_proxy_mode()
    node = proxy_node(tensor, mode.tracer) if mode is not None else None
    if mode is None or node is None or tensor.numel() > largest:
        return None
    needed = ancestors([node], _read)
    if any(each.op == "placeholder" for each in needed):
        return None
    needed = with_writes(needed, _read)
    constants, fills = own_constants(needed, mode), [each for each in needed if _is_filled_like(each)]
    if any(each.op != "call_function" or is_random(each) for each in needed - constants.keys()):
        return None
    with disable_modes(), torch.no_grad():
        values = {each: _copy_of(constant) for each, constant in constants.items()}
        values |= {each: _filled(each) for each in fills}
        if any(value is None for value in values.values()):
            return None
        value: Tensor = extract(node, needed, list(values))(*values.values())
    return value


def _read(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values one reads: of what it is like, ``zeros_like`` needs the shape."""
    return [] if _is_filled_like(node) else node.all_input_nodes


def _is_filled_like(node: fx.Node) -> bool:
    is_fill = node.op == "call_function" and has(node.target, Trait.ZEROS, Trait.ONES, Trait.FULL)
    return is_fill and node.all_input_nodes == [*node.args[:1]]


def _filled(node: fx.Node) -> Tensor | None:
    like: Any = node.args[0]
    of = like.meta["val"]
    if not all(isinstance(size, int) for size in node.meta["val"].shape):
        return None
    empty = torch.empty(of.shape, dtype=of.dtype, device=of.device)
    fill: Any = node.target
    value: Tensor = fill(empty, *node.args[1:], **node.kwargs)
    return value


def _copy_of(constant: Tensor) -> Tensor | None:
    """A copy of its value, since the step may write into it."""
    known = constant.constant if isinstance(constant, FakeTensor) else constant
    return known.clone() if known is not None else None


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
