"""Fake tensors whose ops replace symbolic numbers by their present values, so that torch can cache the results.

Hyper-parameters are symbolic while a step is traced, and stay so in the graph. But shapes and dtypes of an op's result
on fakes are the same for any number. Torch caches results on fakes by their arguments, except for calls with symbols,
which are most calls of an optimizer.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch import FakeTensor, FakeTensorMode

_ZERO_TENSOR = torch.ops.aten._efficientzerotensor.default


class ShapesOnly(FakeTensorMode):
    """A fake mode that passes ops the present value of each symbolic float."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ZERO_TENSOR:
            # Torch's cache takes a zero tensor for any tensor of its shape, so what forward-mode differentiation traces
            # would depend on what this process has traced before, and differ from rank to rank (torch 2.11 to 2.15).
            self.cache_enabled = False
        values = tuple(map(_present_value, args)), {name: _present_value(value) for name, value in kwargs.items()}
        result = super().__torch_dispatch__(func, types, *values)
        if any(isinstance(value, torch.SymFloat) for value in (*args, *kwargs.values())):
            # Torch computes the value of an op on constants alone, but it would be that of this call only.
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, FakeTensor):
                    tensor.constant = None
        return result


def _present_value(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymFloat) and value.node.has_hint() else value
