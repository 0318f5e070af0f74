"""Values that are known while tracing, since they follow from no input and no chance: counts, offsets, tables."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import disable_modes, get_proxy_mode
from .branches import ancestors, cut_out
from .provenance import proxy_node

_LARGEST = 1 << 22  # elements of a value that is worth computing


def known_value(tensor: Tensor) -> Tensor | None:
    """The value of a traced tensor, or None where it is known only when the program runs."""
    mode = get_proxy_mode()
    node = proxy_node(tensor, mode.tracer) if mode is not None else None
    if node is None or tensor.numel() > _LARGEST:
        return None
    needed = ancestors(node)
    random = torch.Tag.nondeterministic_seeded
    if any(n.op != "call_function" or random in getattr(n.target, "tags", ()) for n in needed):
        return None
    with disable_modes(), torch.no_grad():
        value: Tensor = cut_out(node, needed, [])()
    return value


def is_range(tensor: Tensor, step: int) -> bool:
    """Whether ``tensor`` is known to be 0, ``step``, 2 ``step``, ..."""
    value = known_value(tensor)
    if value is None or value.ndim != 1:
        return False
    with disable_modes(), torch.no_grad():
        return bool((value == step * torch.arange(len(value), device=value.device)).all())
