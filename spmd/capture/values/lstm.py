"""``lstm`` while a step is traced: as the ops that it is made of, not as one of oneDNN."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch import TorchFunctionMode


class UnfusedLSTM(TorchFunctionMode):
    """Switches oneDNN off around ``lstm`` alone: that op of its keeps memory that only its own kernel can read.

    Not for a whole step: by this switch torch chooses how the result of a convolution lies, and the trace records what
    it does behind one because of that. A norm's backward is wrong for an image and a gradient that lie differently.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.lstm:
            return func(*args, **(kwargs or {}))
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.backends.mkldnn.enabled = before
