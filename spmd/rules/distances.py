"""Distances between all rows of one tensor and all rows of another: the rows of either may be split, and the batch."""

from __future__ import annotations

from .base import OpCall, Option, parameters
from .einsum_labels import WHOLE, Dims, letters, options
from .optional_ops import aten
from .registry import rule, whole

ROW, OTHER = "YZ"


@rule(*aten("_cdist_forward"))
def distances(call: OpCall) -> list[Option]:
    """Rows of either, and batch dims: ``x1`` is (..., row, width), ``x2`` (..., other, width)."""
    batch = _batch(call)
    if batch is None:
        return []
    return options(call, Dims({"x1": batch + ROW + WHOLE, "x2": batch + OTHER + WHOLE}, batch + ROW + OTHER))


@rule(*aten("_cdist_backward"))
def distances_backward(call: OpCall) -> list[Option]:
    """Rows of ``x1``, whose gradients are sums over the others. Linear in the incoming gradient."""
    batch = _batch(call)
    if batch is None:
        return []
    between = batch + ROW + OTHER
    grad = next(iter(parameters(call.target)))  # 2.15 gave it another name
    operands = {grad: between, "x1": batch + ROW + WHOLE, "x2": batch + OTHER + WHOLE, "cdist": between}
    return options(call, Dims(operands, batch + ROW + WHOLE, reduced=OTHER, linear=((grad,),)))


# The result has all pairs of rows of one tensor in one dim.
whole(*aten("_pdist_forward", "_pdist_backward"))


def _batch(call: OpCall) -> str | None:
    """Labels of the batch dims; None if they broadcast."""
    one, other = call.arg("x1"), call.arg("x2")
    return letters(one.ndim - 2) if one.shape[:-2] == other.shape[:-2] else None
