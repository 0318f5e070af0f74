"""Text of a symbolic number, and its hash: for the length of a trace, those of its value, which a guard then fixes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...foreign_code import is_foreign_file

_KINDS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float}
_METHODS = ("__format__", "__hash__", "__str__", "__repr__")


@contextmanager
def numbers_as_text() -> Iterator[None]:
    """Let the user's code format and look up numbers that each call reads, for the value that they have now."""
    before = [(cls, name, vars(cls).get(name)) for cls in _KINDS for name in _METHODS]
    for cls, name, own in before:
        setattr(cls, name, _of_value(cls, name, own or getattr(cls, name)))
    try:
        yield
    finally:
        for cls, name, own in before:
            if own is None:
                delattr(cls, name)
            else:
                setattr(cls, name, own)


def _of_value(cls: type, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    plain, method = _KINDS[cls], getattr(_KINDS[cls], name)

    def of_value(number: Any, *args: Any) -> Any:
        if is_foreign_file(sys._getframe(1).f_code.co_filename) or not number.node.has_hint():
            return original(number, *args)
        return method(plain(number), *args)

    return of_value
