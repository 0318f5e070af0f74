"""Ops that the partitioner takes apart where a dim that they need whole is split, because that moves less than the dim.

A softmax over a vocabulary of which each rank has a part needs a maximum and a sum over all ranks, a number a row each,
and not the rows. Where nothing is split the op stays one: its kernel is faster than its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .aten import aten
from .base import Info, OpCall
from .einsum_labels import wrap

_HALF = (torch.float16, torch.bfloat16)


def decomposition_of(call: OpCall) -> tuple[int, Callable[..., Any]] | None:
    """(the dim of the first operand that may be split then, the op as a function of others), if there is a way."""
    how = _DECOMPOSITIONS.get(call.target)
    if how is None:
        return None
    first: Info = call.operands[0]
    return (wrap(call.arg("dim"), first.ndim), how) if first.ndim else None


def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Like ``_softmax``: by the largest of each row, and the sum."""
    powers = (_wide(x) - _wide(x).amax(dim, True)).exp()
    return (powers / powers.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


def log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Like ``_log_softmax``."""
    shifted = _wide(x) - _wide(x).amax(dim, True)
    return (shifted - shifted.exp().sum(dim, True).log()).to(torch.float32 if half_to_float else x.dtype)


def softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Like ``_softmax_backward_data``: by one sum a row."""
    product = _wide(grad) * _wide(output)
    return (product - _wide(output) * product.sum(dim, True)).to(dtype)


def log_softmax_backward(grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Like ``_log_softmax_backward_data``."""
    return (_wide(grad) - _wide(output).exp() * _wide(grad).sum(dim, True)).to(dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision computes in fp32, as torch's kernels do."""
    return x.float() if x.dtype in _HALF else x


_SOFTMAXES: dict[str, Callable[..., torch.Tensor]] = {
    "_softmax": softmax,
    "_log_softmax": log_softmax,
    "_softmax_backward_data": softmax_backward,
    "_log_softmax_backward_data": log_softmax_backward,
}
_DECOMPOSITIONS = {op: how for name, how in _SOFTMAXES.items() for op in aten(name)}
