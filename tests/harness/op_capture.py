"""Capture and replay where there is no GPU: ops are noted with their memory, and run again on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OpCapture(TorchDispatchMode):
    """In place of ``CudaCapture``: writes are noted and not done, and what an op returns has memory without values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Capture a function. Its replay computes with the values that memory has by then."""
        self.noted = []
        with self:
            returned = function()
        noted = self.noted
        return returned, lambda: replay(noted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        returned = written(func, args, kwargs) if func._schema.is_mutable else func(*args, **kwargs)
        if not func.is_view:
            self.noted.append((func, args, kwargs, returned))
        return returned


def written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an op returns that writes to arguments: these."""
    names = [each.name for each in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    mutated = [given[each.name] for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    count = len(func._schema.returns)
    return None if count == 0 else mutated[0] if count == 1 else tuple(mutated[:count])


def replay(noted: list[tuple[Any, Any, Any, Any]]) -> None:
    """Run all ops again, each into the memory that its result had."""
    for func, args, kwargs, returned in noted:
        again = func(*args, **kwargs)
        if not func._schema.is_mutable:
            for memory, value in zip(tree_leaves(returned), tree_leaves(again), strict=True):
                if isinstance(memory, Tensor):
                    memory.copy_(value)
