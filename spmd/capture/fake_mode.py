"""Fake tensors that do not ask what number a symbolic number is.

Hyper-parameters are symbolic while a step is traced. The graph keeps them so; but what an op gives on fakes, shapes and
dtypes, is the same for any number. Torch keeps results of calls on fakes for calls that are alike, and not for those
with symbols, which are most calls of an optimizer.
"""

from __future__ import annotations

from typing import Any

import torch

from .._torch import FakeTensor, FakeTensorMode


class ShapesOnly(FakeTensorMode):
    """Ops on fakes get the present value of each symbolic float."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (tuple(args), dict(kwargs or {}))
        args, kwargs = tuple(map(_present, args)), {name: _present(value) for name, value in given[1].items()}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if any(isinstance(value, torch.SymFloat) for value in (*given[0], *given[1].values())):
            # Of constants alone torch computes the value itself, but it is that of this call only.
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, FakeTensor):
                    tensor.constant = None
        return result


def _present(value: Any) -> Any:
    return value.node.hint if isinstance(value, torch.SymFloat) and value.node.has_hint() else value
