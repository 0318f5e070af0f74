"""Symbolic ``min``, ``max`` and functions of ``math``, for numbers that are known only when the program runs.

While the step is traced, what ``.item()`` returns, what a parameter group holds and numbers that change from call to
call are symbols. Python's own ``min`` and ``max`` branch on which of two is smaller, and those of ``math`` ask for the
value, which a graph cannot do; torch's compute the same in one node.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce, wraps
from typing import Any

import torch

from .._torch import SYMBOLIC_MATH

_SYMBOLS = (torch.SymFloat, torch.SymInt)


@contextmanager
def symbolic_math() -> Iterator[None]:
    """Let these functions take symbols for the length of the context; they treat all other values as before."""
    before = {name: getattr(math, name) for name in _MATH}
    least, most = builtins.min, builtins.max
    builtins.min, builtins.max = _of_items(least, torch.sym_min), _of_items(most, torch.sym_max)
    for name, symbolic in _MATH.items():
        setattr(math, name, _with_symbols(before[name], symbolic))
    try:
        yield
    finally:
        builtins.min, builtins.max = least, most
        vars(math).update(before)


def _of_items(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Any:
    @wraps(plain)
    def extended(*args: Any, **kwargs: Any) -> Any:
        items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or not any(isinstance(item, _SYMBOLS) for item in items):
            return plain(*args, **kwargs)
        return reduce(symbolic, items)

    return extended


def _with_symbols(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Any:
    @wraps(plain)
    def extended(*args: Any) -> Any:
        return symbolic(*args) if any(isinstance(each, _SYMBOLS) for each in args) else plain(*args)

    return extended


def _pow(x: Any, y: Any) -> Any:
    return torch.sym_float(x) ** torch.sym_float(y)


def _log(x: Any, base: Any = math.e) -> Any:
    log2 = SYMBOLIC_MATH["log2"]
    return log2(x) * math.log(2) if base == math.e else log2(x) / log2(base)


_MATH: dict[str, Callable[..., Any]] = {
    **SYMBOLIC_MATH,
    "exp": partial(_pow, math.e),
    "exp2": partial(_pow, 2.0),
    "fabs": lambda x: abs(torch.sym_float(x)),
    "log": _log,
    "log10": partial(_log, base=10.0),
    "pow": _pow,
}
