"""``tensor.data = other`` while a step is traced.

It swaps a tensor's memory below everything that a tracer sees: the update would be lost without a word. While this mode
is on it copies instead, which is the same to all who read the tensor afterwards.
"""

from __future__ import annotations

from typing import Any

import torch

from passes import CaptureError

from ._torch import TorchFunctionMode

_SET = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class SetDataCopies(TorchFunctionMode):
    """Each assignment to ``.data`` is a copy into it. Raises ``CaptureError`` for data of another shape or dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != _SET:
            return func(*args, **(kwargs or {}))
        tensor, new = args
        if (tensor.shape, tensor.dtype) != (new.shape, new.dtype):
            raise CaptureError(
                f"the step assigns .data of {new.dtype}{list(new.shape)} to a tensor of {tensor.dtype}"
                f"{list(tensor.shape)}: data of the same shape and dtype is expected, since state keeps both"
            )
        tensor.data.copy_(new)
        return None
