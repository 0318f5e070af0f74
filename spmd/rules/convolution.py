"""Convolutions: the batch may be split, and the channels: without groups a split contraction gives partial sums.

Groups are convolutions of their own. A step that folds rows into them, to convolve each row by a weight of its own,
keeps its rows split.

Channels are split evenly, and no rank is left without rows, because kernels reject tensors that are empty.
"""

from __future__ import annotations

from .base import OpCall, Option
from .einsum_labels import WHOLE, Dims, options
from .optional_ops import aten
from .registry import rule


@rule(*aten("convolution"))
def convolution(call: OpCall) -> list[Option]:
    """Rows, output channels, and (unless a bias would be added on every rank) input channels."""
    labels = _labels(call)
    if labels is None:
        return []
    source, weight, result = labels
    bias = call.arg("bias") is not None
    linear = (("input", "bias"), ("weight", "bias")) if bias else (("input",), ("weight",))
    operands = {"input": source, "weight": weight, "bias": _of_bias(weight)}
    onto = "bias" if bias else ""
    dims = Dims(operands, result, reduced="i", even="iog", filled="n", grouped="g", onto=onto, linear=linear)
    return options(call, dims)


@rule(*aten("convolution_backward"))
def convolution_backward(call: OpCall) -> list[Option]:
    """Rows and channels: the gradient of the input sums over output channels, those of weight and bias over rows."""
    labels = _labels(call)
    if labels is None:
        return []
    source, weight, result = labels
    operands = {"grad_output": result, "input": source, "weight": weight}
    results, linear = (source, weight, _of_bias(weight)), (("grad_output",),)
    return options(
        call, Dims(operands, results, reduced="no", same="i", even="iog", filled="n", grouped="g", linear=linear)
    )


def _of_bias(weight: str) -> str:
    return next((c for c in "og" if c in weight), WHOLE)


def _labels(call: OpCall) -> tuple[str, str, str] | None:
    """Labels of input, weight and result: n rows, i channels in, o channels out, g channels of several groups."""
    source, weight = call.arg("input"), call.arg("weight")
    if source.ndim != weight.ndim:
        return None
    space = WHOLE * (source.ndim - 2)
    if call.arg("groups") != 1:
        g = "g" if call.arg("groups") % call.size == 0 else WHOLE
        return "n" + g + space, g + WHOLE + space, "n" + g + space
    return "ni" + space, ("io" if call.arg("transposed") else "oi") + space, "no" + space
