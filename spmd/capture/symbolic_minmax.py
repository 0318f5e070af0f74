"""Symbolic ``min`` and ``max``, for numbers that are known only when the program runs.

While the step is traced, what ``.item()`` returns and what a parameter group holds are symbols. Python's own ``min``
and ``max`` branch on which of two is smaller, which a graph cannot do; torch's compute the same in one node.
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
    """Let ``min`` and ``max`` take symbols for the length of the context; they treat all other values as before."""
    before = builtins.min, builtins.max
    builtins.min, builtins.max = _with_symbols(before[0], torch.sym_min), _with_symbols(before[1], torch.sym_max)
    try:
        yield
    finally:
        builtins.min, builtins.max = before


def _with_symbols(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Any:
    @wraps(plain)
    def extended(*args: Any, **kwargs: Any) -> Any:
        items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or not any(isinstance(item, _SYMBOLS) for item in items):
            return plain(*args, **kwargs)
        return reduce(symbolic, items)

    return extended
