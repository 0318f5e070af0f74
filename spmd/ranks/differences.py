"""Compare values: which element differs most, by more than sums in another order may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROUNDING = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 5e-2  # of bfloat16, float16 and narrower dtypes


@dataclass(frozen=True)
class Difference:
    """The first difference of two values: both of them, and the sentence about it, with the index of an element."""

    expected: Any
    actual: Any
    says: str


def rounding_of(dtypes: Sequence[torch.dtype]) -> float:
    """The relative error to allow for sums in another order, where values pass through these dtypes."""
    return max([_ROUNDING[torch.float64], *(_ROUNDING.get(each, _COARSE) for each in dtypes if _rounds(each))])


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def difference(expected: Any, actual: Any, rounding: float) -> Difference | None:
    """The element that differs most, None if all agree to within ``rounding``; 0.0 asks for equal bits."""
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return _difference_of_numbers(expected, actual, rounding)
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        one, other = (f"{value.dtype} {tuple(value.shape)}" for value in (expected, actual))
        return Difference(one, other, f"expected {one}, got {other}")
    if expected.numel() == 0:
        return None
    exact = not _rounds(expected.dtype)
    precise = torch.complex128 if expected.is_complex() else (expected.dtype if exact else torch.float64)
    want, have = expected.detach().cpu().to(precise), actual.detach().cpu().to(precise)
    if exact:
        error, allowed = (want != have).double(), torch.zeros(())
    else:
        size = want.abs().nan_to_num(posinf=0.0)
        scale = max(1.0, float(size.max()))
        error, allowed = (want - have).abs(), rounding * (size + 0.1 * scale)
        same = (want == have) | (want.isnan() & have.isnan())
        error = torch.where(same, 0.0, error.nan_to_num(nan=float("inf")))
    wrong = error > allowed
    if not wrong.any():
        return None
    at = int(torch.where(wrong, error, -1.0).argmax())
    index = [int(each) for each in torch.unravel_index(torch.tensor(at), expected.shape)] if expected.ndim else []
    pair = want.reshape(-1)[at].item(), have.reshape(-1)[at].item()
    where = f"at {index} " if index else ""
    count = f", and {int(wrong.sum()) - 1} of {expected.numel()} more differ" if int(wrong.sum()) > 1 else ""
    return Difference(*pair, f"{where}expected {pair[0]!r}, got {pair[1]!r}{count}")


def _difference_of_numbers(expected: Any, actual: Any, rounding: float) -> Difference | None:
    if isinstance(expected, float) and isinstance(actual, float):
        one, other = (torch.tensor(value, dtype=torch.float64) for value in (expected, actual))
        return difference(one, other, rounding)
    if type(expected) is type(actual) and (isinstance(expected, Tensor) or bool(expected == actual)):
        return None
    return Difference(expected, actual, f"expected {expected!r}, got {actual!r}")
