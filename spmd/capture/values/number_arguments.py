"""Functions of torch that would fix a number for which a symbol stands, in forms that take it as it is.

``torch.tensor(s)`` asks for the value of ``s``, and ``F.batch_norm`` and ``F.dropout`` pass theirs to ops that take
plain floats. Here tensors are filled with the number, running statistics are interpolated, and a mask is drawn.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import TorchFunctionMode, tree_flatten

_SYMBOLS = (torch.SymFloat, torch.SymInt)


class NumberArguments(TorchFunctionMode):
    """Calls these functions in the forms below where a symbol is among their arguments, for the length of a trace.

    ``calls`` are the numbers of those calls, among all calls of these functions; those given take the forms, too: so
    the trace with plain numbers is that with symbols.
    """

    def __init__(self, calls: Collection[int] = ()) -> None:
        super().__init__()
        self.calls, self._count = set(calls), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        form = _FORMS.get(func)
        if form is not None:
            self._count += 1
            if any(isinstance(leaf, _SYMBOLS) for leaf in tree_flatten((args, kwargs))[0]):
                self.calls.add(self._count)
            if self._count in self.calls:
                return form(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _tensor(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False, **_: Any
) -> Tensor:
    """As ``torch.tensor``, of numbers in lists and tuples."""
    if isinstance(data, Tensor):
        return data.to(dtype=dtype, device=device)
    if dtype is None:
        leaves = tree_flatten(data)[0]
        whole = all(isinstance(leaf, (int, torch.SymInt)) for leaf in leaves)
        dtype = torch.int64 if whole else torch.get_default_dtype()
    return _filled(data, dtype, device).requires_grad_(requires_grad)


def _filled(data: Any, dtype: torch.dtype, device: Any) -> Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_filled(each, dtype, device) for each in data])
    return torch.full((), data, dtype=dtype, device=device)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return _tensor(data, dtype=dtype, device=device)


def _new_tensor(
    self: Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    return _tensor(data, dtype=dtype or self.dtype, device=device or self.device, requires_grad=requires_grad)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """A batch norm whose statistics are those of the batch, and then a part of the running ones."""
    if not training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    normed = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
    running_mean.mul_(1 - momentum).add_(mean * momentum)
    running_var.mul_(1 - momentum).add_(variance * momentum)
    return normed


def _dropout(input: Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training:
        return input
    drawn = torch.rand_like(input, dtype=torch.promote_types(input.dtype, torch.float32))  # bf16 has 256 values here
    kept = (drawn >= p).to(input.dtype) / (1.0 - p if p < 1.0 else 1.0)
    return input.mul_(kept) if inplace else input * kept


_FORMS: dict[Any, Any] = {
    torch.tensor: _tensor,
    torch.as_tensor: _as_tensor,
    torch.asarray: _as_tensor,
    Tensor.new_tensor: _new_tensor,
    F.batch_norm: _batch_norm,
    F.dropout: _dropout,
}
