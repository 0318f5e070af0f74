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
from ..unexpected_errors import mark_as_users

_SYMBOLS = (torch.SymFloat, torch.SymInt)


@contextmanager
def symbolic_math() -> Iterator[None]:
    """Let these functions take symbols for the length of the context; they treat all other values as before."""
    before = {name: getattr(math, name) for name in _MATH}
    least, most = builtins.min, builtins.max
    builtins.min, builtins.max = _of_items(least, torch.sym_min), _of_items(most, torch.sym_max)
    for name, symbolic in _MATH.items():
        setattr(math, name, _with_symbols(before[name], symbolic))
    methods = [(cls, name, vars(cls).get(name)) for cls, added in _METHODS.items() for name in added]
    for cls, name, _ in methods:
        setattr(cls, name, _METHODS[cls][name])
    try:
        yield
    finally:
        for cls, name, method in methods:
            delattr(cls, name) if method is None else setattr(cls, name, method)
        builtins.min, builtins.max = least, most
        vars(math).update(before)


def _of_items(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Any:
    @wraps(plain)
    def extended(*args: Any, **kwargs: Any) -> Any:
        items = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        if kwargs or not any(isinstance(item, _SYMBOLS) for item in items):
            return _of_the_user(plain, *args, **kwargs)
        return reduce(symbolic, items)

    return extended


def _with_symbols(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Any:
    @wraps(plain)
    def extended(*args: Any) -> Any:
        return symbolic(*args) if any(isinstance(each, _SYMBOLS) for each in args) else _of_the_user(plain, *args)

    return extended


def _of_the_user(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns; an error in it is the user's."""
    try:
        return plain(*args, **kwargs)
    except Exception as error:
        mark_as_users(error)
        raise


def _pow(x: Any, y: Any) -> Any:
    return torch.sym_float(x) ** torch.sym_float(y)


def _log(x: Any, base: Any = math.e) -> Any:
    log2 = SYMBOLIC_MATH["log2"]
    return log2(x) * math.log(2) if base == math.e else log2(x) / log2(base)


def _floor_divided(a: Any, b: Any) -> Any:
    """``a // b`` as Python has it: torch rounds the quotient first, so that 1.0 // 0.1 were 10."""
    return torch.sym_float(round((a - a % b) / b))


_OF_BOTH = {
    "__divmod__": lambda a, b: (a // b, a % b),
    "__rdivmod__": lambda a, b: (b // a, b % a),
    "real": property(lambda a: a),
}
_METHODS: dict[type, dict[str, Any]] = {  # that torch has not, or otherwise (2.11 to 2.15)
    torch.SymInt: {**_OF_BOTH, "__invert__": lambda a: -a - 1},
    torch.SymFloat: {
        **_OF_BOTH,
        "__floordiv__": _floor_divided,
        "__rfloordiv__": lambda a, b: _floor_divided(b, a),
    },
}

_MATH: dict[str, Callable[..., Any]] = {
    **SYMBOLIC_MATH,
    "exp": partial(_pow, math.e),
    "exp2": partial(_pow, 2.0),
    "fabs": lambda x: abs(torch.sym_float(x)),
    "log": _log,
    "log10": partial(_log, base=10.0),
    "pow": _pow,
}
