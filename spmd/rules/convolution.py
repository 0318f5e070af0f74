"""Convolutions: the batch may be split, and without groups also the channels, a split contraction giving partial sums.

All splits are even, because kernels reject tensors without rows.
"""

from __future__ import annotations

from .aten import aten
from .base import OpCall, Option
from .einsum_labels import WHOLE, Dims, options
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
    operands = {"input": source, "weight": weight, "bias": "o" if "o" in weight else WHOLE}
    dims = Dims(operands, result, reduced="i", even="*", onto="bias" if bias else "", linear=linear)
    return options(call, dims)


@rule(*aten("convolution_backward"))
def convolution_backward(call: OpCall) -> list[Option]:
    """Rows and channels: the gradient of the input sums over output channels, those of weight and bias over rows."""
    labels = _labels(call)
    if labels is None:
        return []
    source, weight, result = labels
    bias = "o" if "o" in weight else WHOLE
    operands = {"grad_output": result, "input": source, "weight": weight}
    dims = Dims(operands, (source, weight, bias), reduced="no", same="i", even="*", linear=(("grad_output",),))
    return options(call, dims)


def _labels(call: OpCall) -> tuple[str, str, str] | None:
    """Labels of input, weight and result: n rows, i channels in, o channels out; with groups only the rows."""
    source, weight = call.arg("input"), call.arg("weight")
    if source.ndim != weight.ndim:
        return None
    space = WHOLE * (source.ndim - 2)
    if call.arg("groups") != 1:
        return "n." + space, ".." + space, "n." + space
    return "ni" + space, ("io" if call.arg("transposed") else "oi") + space, "no" + space
