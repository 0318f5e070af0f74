"""``min`` and ``max`` of numbers that are known only when the program runs.

While the step is traced, what ``.item()`` returns and what a parameter group holds are symbols. Python's own ``min``
and ``max`` ask which of two is smaller, and a graph cannot follow the answer; torch's say the same as one node.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce, wraps
from typing import Any

import torch

_SYMBOLS = (torch.SymFloat, torch.SymInt)


@contextmanager
def symbolic_min_and_max() -> Iterator[None]:
    """Let ``min`` and ``max`` take symbols for the length of the context; of anything else they stay what they are."""
    before = builtins.min, builtins.max
    builtins.min, builtins.max = _selecting(before[0], torch.sym_min), _selecting(before[1], torch.sym_max)
    try:
        yield
    finally:
        builtins.min, builtins.max = before


def _selecting(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Any:
    @wraps(plain)
    def select(*args: Any, **kwargs: Any) -> Any:
        items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or not any(isinstance(item, _SYMBOLS) for item in items):
            return plain(*args, **kwargs)
        return reduce(symbolic, items)

    return select
