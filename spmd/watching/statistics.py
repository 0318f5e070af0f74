"""The statistics of values: a number of each, several in a row; what is rounded is computed in fp32 at least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistic:
    """``of``: a tensor of 0 dims for a value; ``as_one``: that of several together; ``finish``: the statistic of it.

    What is summed over the mesh is not finished yet, so that one collective serves a row of values.
    """

    of: Callable[[Tensor], Tensor]
    as_one: Callable[[Tensor], Tensor] = torch.sum
    finish: Callable[[Tensor], Tensor] = lambda row: row


def row_of(each: Sequence[Tensor], statistic: Statistic, as_one: bool) -> Tensor:
    """The statistics of values, or the one of all of them, in a row, from what ``of`` gives for each."""
    dtype = reduce(torch.promote_types, (x.dtype for x in each))
    row = torch.stack([x.to(each[0].device, dtype) for x in each])
    return statistic.finish(statistic.as_one(row).reshape(1) if as_one else row)


def _squares(x: Tensor) -> Tensor:
    size = _wide(x.abs() if x.is_complex() else x)
    return (size * size).sum()


def _largest(x: Tensor) -> Tensor:
    size = _wide(x).abs()
    return size.amax() if x.numel() else size.sum()


def _zeros(x: Tensor) -> Tensor:
    return (x == 0).sum()


def _not_finite(x: Tensor) -> Tensor:
    return (~torch.isfinite(_wide(x))).sum()


def _overflown(x: Tensor) -> Tensor:
    size = _wide(x.abs() if x.is_complex() else x)
    return (~(size < torch.inf)).sum()


def _wide(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x if x.is_complex() else x.double()
    return x if x.dtype.itemsize >= 4 else x.float()


STATISTICS = {
    "norm": Statistic(_squares, finish=torch.sqrt),
    "max": Statistic(_largest, torch.amax),
    "zeros": Statistic(_zeros),
    "nan": Statistic(_not_finite),
    "overflow": Statistic(_overflown),
}
"""``norm``: Euclidean; ``max``: the largest absolute value; ``zeros``: how many elements are 0; ``nan``: NaN or Inf;
``overflow``: NaN or +Inf, where -Inf is a mask."""
