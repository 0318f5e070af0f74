"""Distances between all rows of one tensor and all rows of another: the rows of either may be split, and the batch."""

from __future__ import annotations

from .aten import aten
from .base import OpCall, Option, parameters
from .einsum_labels import WHOLE, Dims, letters, options
from .registry import rule, whole

ROW, OTHER = "YZ"


@rule(*aten("_cdist_forward"))
def distances(call: OpCall) -> list[Option]:
    """``x1``: (..., row, width), ``x2``: (..., other, width), with the same dims in front."""
    batch = _batch(call)
    if batch is None:
        return []
    return options(call, Dims({"x1": batch + ROW + WHOLE, "x2": batch + OTHER + WHOLE}, batch + ROW + OTHER))


@rule(*aten("_cdist_backward"))
def distances_backward(call: OpCall) -> list[Option]:
    """The gradient of ``x1``: a row's is a sum over the others. Linear in the gradient that comes in."""
    batch = _batch(call)
    if batch is None:
        return []
    between = batch + ROW + OTHER
    grad = next(iter(parameters(call.target)))  # 2.15 gave it another name
    operands = {grad: between, "x1": batch + ROW + WHOLE, "x2": batch + OTHER + WHOLE, "cdist": between}
    return options(call, Dims(operands, batch + ROW + WHOLE, reduced=OTHER, linear=((grad,),)))


# Pairs of rows of one tensor, in one dim.
whole(*aten("_pdist_forward", "_pdist_backward"))


def _batch(call: OpCall) -> str | None:
    """Labels of the dims in front of the rows; None where they broadcast."""
    one, other = call.arg("x1"), call.arg("x2")
    return letters(one.ndim - 2) if one.shape[:-2] == other.shape[:-2] else None
