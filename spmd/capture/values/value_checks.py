"""Functions of torch that check values and raise: while a step is traced, the check passes.

What such a function computes does not depend on its check, which would need the value of a tensor.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from torch.nn import functional as F

_CHECKING = {F.gaussian_nll_loss.__code__}  # raises for a negative variance
# Raises for a minimum above the maximum; whether there has been any value is asked just after there has been one.
_OF_OBSERVERS = "torch.ao.quantization.utils", "check_min_max_valid"
_DEPTH = 24  # frames between an op that reads a value and the function that checks it: those of modes


def is_check(frame: FrameType | None) -> bool:
    """Whether the op at ``frame`` reads the value that a function of torch checks."""
    checking = _CHECKING | _of_observers()
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code in checking:
            return True
        frame = frame.f_back
    return False


def _of_observers() -> set[CodeType]:
    """The code of the check of observers, once the user has imported it."""
    module, name = _OF_OBSERVERS
    function = getattr(sys.modules.get(module), name, None)
    return {function.__code__} if function is not None else set()
