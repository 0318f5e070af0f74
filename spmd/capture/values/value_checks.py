"""Functions of torch that check values and raise: while a step is traced, the check passes.

What such a function computes does not depend on its check, which would need the value of a tensor.
"""

from __future__ import annotations

from types import FrameType

from torch.nn import functional as F

_CHECKING = {F.gaussian_nll_loss.__code__}  # raises for a negative variance
_DEPTH = 24  # frames between an op that reads a value and the function that checks it: those of modes


def is_check(frame: FrameType | None) -> bool:
    """Whether the op at ``frame`` reads the value that a function of torch checks."""
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code in _CHECKING:
            return True
        frame = frame.f_back
    return False
