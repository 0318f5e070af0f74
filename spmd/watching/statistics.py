"""The statistics of values, as tensors of 0 dims; what is rounded is computed in fp32 at least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistic:
    """``of``: some tensors, each. ``as_one``: of all of them, from those of each."""

    of: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    as_one: Callable[[Tensor], Tensor]


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.linalg.vector_norm(_wide(x)) for x in tensors]


def _largest(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [torch.linalg.vector_norm(_wide(x), math.inf) if x.numel() else x.new_zeros(()) for x in tensors]


def _zeros(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [(x == 0).sum() for x in tensors]


def _not_finite(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [(~torch.isfinite(x)).sum() for x in tensors]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


STATISTICS = {
    "norm": Statistic(_norms, torch.linalg.vector_norm),
    "max": Statistic(_largest, torch.amax),
    "zeros": Statistic(_zeros, torch.sum),
    "nan": Statistic(_not_finite, torch.sum),
}
"""``norm``: Euclidean; ``max``: the largest absolute value; ``zeros``: how many elements are 0; ``nan``: NaN or Inf."""
