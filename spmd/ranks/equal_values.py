"""Values that must be equal on all ranks: learning rates, 0-dim tensors, arguments that are replicated.

Ranks compare them as a number at each call, where that costs nothing (Python's numbers and 0-dim tensors on the CPU),
and as text when they compile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

_SHOWN = 8  # elements in a message


def digest(values: Iterable[Any]) -> int:
    """A number for the Python numbers, and 0-dim tensors on the CPU, among ``values``: equal where they are equal."""
    text = repr([each for each in map(number, values) if each is not None])
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def number(value: Any) -> Any:
    """``value`` as a Python number, None if it is none or is not on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.ndim == 0 and value.device.type == "cpu" else None
    return value if isinstance(value, (bool, int, float)) else None


def contents(value: torch.Tensor) -> str:
    """The elements of a tensor as text; of a large one the first, and a hash of all."""
    values = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    shown = ", ".join(map(str, values.flatten()[:_SHOWN].tolist()))
    if values.numel() <= _SHOWN:
        return f"[{shown}]"
    raw = values.view(torch.uint8) if values.dtype is not torch.bool else values.to(torch.uint8)
    return f"[{shown}, ...], sha256 {hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]}"
