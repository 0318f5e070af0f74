"""Deep copies of traced tensors: clones, so that a step may copy a model, and train the copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..._torch import TorchFunctionMode


class TensorCopies(TorchFunctionMode):
    """Clones tensors where ``copy.deepcopy`` copies their memory, which a trace does not see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = _clone(tensor, memo)
        return memo[id(tensor)]


def _clone(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if not tensor.is_leaf:
        raise RuntimeError("only tensors that are leaves can be deep-copied, as in eager: copy tensor.detach()")
    made = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    made.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        made.grad = tensor.grad.detach().clone()
    return made
