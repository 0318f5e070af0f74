"""Fill memory with NaN, or the largest integer, until a result is written, so that an early read shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import tree_flatten


def poisoned(val: Any, device: torch.device | None = None) -> Any:
    """Memory for the result that a fake value describes, without its values; by default on the device of the fake."""
    if isinstance(val, (list, tuple)):
        return [poisoned(each, device) for each in val]
    made = torch.empty_strided(tuple(val.shape), val.stride(), dtype=val.dtype, device=device or val.device)
    poison([made])
    return made


def poison(tensors: Sequence[Tensor]) -> None:
    """Fill with NaN, or the largest number of an integer dtype, so that an early read shows."""
    for x in tensors:
        if x.is_floating_point() or x.is_complex():
            x.fill_(float("nan"))
        elif x.dtype is not torch.bool:
            x.fill_(torch.iinfo(x.dtype).max)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a value, however deep in lists."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def share_memory(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether storages of some tensors and of others overlap."""
    pairs = ((_span(x), _span(y)) for x in some for y in others if x.numel() and y.numel())
    return any(a < d and c < b for (a, b), (c, d) in pairs)


def overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether the bytes from the first to the last element of some tensors and of others overlap."""
    pairs = ((_bytes(x), _bytes(y)) for x in some for y in others if x.numel() and y.numel())
    return any(a < d and c < b for (a, b), (c, d) in pairs)


def _bytes(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _span(x: Tensor) -> tuple[int, int]:
    start = x.untyped_storage().data_ptr()
    return start, start + x.untyped_storage().nbytes()
