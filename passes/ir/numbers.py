"""The numbers of a call as tensors: one of fp64, as Python's floats are, and one of int64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .program import Input


def pack(declared: Input, values: Mapping[str, Any]) -> torch.Tensor:
    """The values of the numbers that an input holds, by name, as one tensor of the CPU."""
    return torch.tensor([values[name] for name in declared.numbers], dtype=declared.dtype)


def unpack(declared: Input, packed: torch.Tensor) -> dict[str, Any]:
    """The values by name; of symbols that stand for numbers, these."""
    values = packed.unbind() if packed.is_complex() else packed.tolist()
    return dict(zip(declared.numbers, values, strict=True))
