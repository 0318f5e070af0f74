"""Layer, group, RMS and (in evaluation) batch norm: the dims that are not normalized over may be split.

The gradients of weight and bias sum over all rows, so split rows leave partial ones. Batch norm in training needs the
statistics of the whole batch, and capture decomposes it.
"""

from __future__ import annotations

from .base import OpCall, Option
from .einsum_labels import EQUAL, WHOLE, Dims, letters, options, without
from .optional_ops import aten
from .registry import rule


@rule(*aten("native_layer_norm", "_fused_rms_norm"))
def row_norm(call: OpCall) -> list[Option]:
    """Leading dims; statistics have the normalized dims with size 1."""
    names = _rows(call)
    return options(call, Dims({"input": names}, names, filled="*"))


@rule(*aten("native_layer_norm_backward", "_fused_rms_norm_backward"))
def row_norm_backward(call: OpCall) -> list[Option]:
    """Leading dims; the gradients of weight and bias are partial. Linear in the incoming gradient."""
    names = _rows(call)
    operands = {name: names for name in ("grad_out", "input", "mean", "rstd") if call.arg(name) is not None}
    weights = WHOLE * len(call.arg("normalized_shape"))
    results = (names, *[weights] * (len(call.results) - 1))
    return options(call, Dims(operands, results, reduced=names, filled="*", linear=(("grad_out",),)))


def _rows(call: OpCall) -> str:
    whole = len(call.arg("normalized_shape"))
    return letters(call.arg("input").ndim - whole) + WHOLE * whole


@rule(*aten("native_group_norm"))
def group_norm(call: OpCall) -> list[Option]:
    """The batch dim."""
    names = "n" + WHOLE * (call.arg("input").ndim - 1)
    return options(call, Dims({"input": names}, (names, "n.", "n."), filled="*"))


@rule(*aten("native_group_norm_backward"))
def group_norm_backward(call: OpCall) -> list[Option]:
    """The batch dim; the gradients of weight and bias are partial."""
    if call.results[0] is None:
        return []  # the local batch size, an argument, is read from the first result
    names = "n" + WHOLE * (call.arg("input").ndim - 1)
    operands = {"grad_out": names, "input": names, "mean": "n.", "rstd": "n."}
    dims = Dims(operands, (names, ".", "."), reduced="n", filled="*", linear=(("grad_out",),))
    return options(call, dims)


@rule(*aten("native_batch_norm", "_native_batch_norm_legit_functional", "cudnn_batch_norm"))
def batch_norm(call: OpCall) -> list[Option]:
    """In evaluation, every dim but the channels: since the statistics are given."""
    return [] if call.arg("training") else _by_given_statistics(call)


@rule(*aten("_native_batch_norm_legit_no_training"))
def batch_norm_no_training(call: OpCall) -> list[Option]:
    """Every dim but the channels: this op is for evaluation only."""
    return _by_given_statistics(call)


def _by_given_statistics(call: OpCall) -> list[Option]:
    names = without(letters(call.arg("input").ndim), 1)
    rest = [EQUAL] * (len(call.results) - 1)
    return options(call, Dims({"input": names}, (names, *rest), filled="*"))


@rule(*aten("native_batch_norm_backward"))
def batch_norm_backward(call: OpCall) -> list[Option]:
    """In evaluation, every dim but the channels; the gradients of weight and bias are partial."""
    if call.arg("train"):
        return []
    names = without(letters(call.arg("input").ndim), 1)
    operands = {"grad_out": names, "input": names}
    return options(call, Dims(operands, (names, ".", "."), reduced=names, filled="*", linear=(("grad_out",),)))
