"""The number of ranks that a step asks for: 1, as on the one device that it is written for.

Its losses, counts and rows are those of all ranks, so that a factor for each rank would be one too many.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from types import CodeType

from torch.distributed import get_world_size

from ..._torch import group_sizes
from ...interpreter.foreign_code import is_foreign_frame, is_importing

_ASKS: CodeType = get_world_size.__code__


def one_rank() -> AbstractContextManager[None]:
    """Let ``get_world_size`` return 1 to the user's code in this thread, for the length of the context."""
    thread = threading.get_ident()

    def answer(size: int) -> int:
        asks = sys._getframe(2)  # behind the function that group_sizes puts in torch's place
        caller = asks.f_back if asks.f_code is _ASKS and threading.get_ident() == thread else None
        return size if caller is None or is_foreign_frame(caller) or is_importing(caller) else 1

    return group_sizes(answer)
