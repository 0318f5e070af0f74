"""Structural equality of plain Python values: whether a trace that saw one would have been the same with the other."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one device, one dtype, one shape, and values that are equal to the last bit."""
    if (one.device, one.dtype, one.shape) != (other.device, other.dtype, other.shape):
        return False
    bits = (x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(*bits)


def structurally_equal(a: Any, b: Any) -> bool:
    """Whether two plain values have one type, are equal to the last bit, and have structurally equal attributes.

    Tensors are equal only to themselves. A value whose comparison raises is equal to nothing else.
    """
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor):
        return False
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(structurally_equal, a, b))
    if isinstance(a, partial):
        return structurally_equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(structurally_equal, a.values(), b.values()))
    try:
        return bool(a == b) and structurally_equal(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
    except Exception:
        return False
