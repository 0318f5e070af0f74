"""Decompositions for ops that need a whole dim, for where that dim is split and gathering it would move more bytes.

A softmax over a split vocabulary needs a maximum and a sum per row over all ranks, and not the rows themselves. Where
nothing is split the op stays as it is, since its kernel is faster than the ops of the decomposition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import Info, OpCall
from .einsum_labels import wrap
from .optional_ops import aten

_HALF = (torch.float16, torch.bfloat16)


def decomposition_of(call: OpCall) -> tuple[int, Callable[..., Any]] | None:
    """(the dim of the first operand that may then be split, the op as a function of other ops), or None."""
    decomposition = _DECOMPOSITIONS.get(call.target)
    if decomposition is None:
        return None
    first: Info = call.operands[0]
    return (wrap(call.arg("dim"), first.ndim), decomposition) if first.ndim else None


def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Equivalent to ``_softmax``, by the maximum and the sum of each row."""
    powers = (_wide(x) - _wide(x).amax(dim, True)).exp()
    return (powers / powers.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Equivalent to ``_log_softmax``."""
    shifted = _wide(x) - _wide(x).amax(dim, True)
    return (shifted - shifted.exp().sum(dim, True).log()).to(torch.float32 if half_to_float else x.dtype)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Equivalent to ``_softmax_backward_data``, by one sum per row."""
    product = _wide(grad) * _wide(output)
    return (product - _wide(output) * product.sum(dim, True)).to(dtype)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Equivalent to ``_log_softmax_backward_data``."""
    return (_wide(grad) - _wide(output).exp() * _wide(grad).sum(dim, True)).to(dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in fp32 if it has half precision, as in torch's kernels."""
    return x.float() if x.dtype in _HALF else x


_SOFTMAXES: dict[str, Callable[..., torch.Tensor]] = {
    "_softmax": softmax,
    "_log_softmax": log_softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": log_softmax_backward,
}
_DECOMPOSITIONS = {op: function for name, function in _SOFTMAXES.items() for op in aten(name)}
