"""What arrays, views of memory, context variables and the environment hold: values that lie at no site.

They are read by code in C, so that nobody sees which of them a step reads: the whole is compared at each call.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Values = tuple[Any, ...]
LARGE = 1 << 26  # bytes of an array of which no copy is made: it may be a data set


@dataclass(frozen=True, eq=False)
class Contents:
    """One such object, with what it held before the step; ``at``: the addresses of an array's values."""

    name: str
    read: Callable[[], Values]
    before: Values
    at: range

    @classmethod
    def of(cls, value: Any, name: str) -> Contents | None:
        """The contents of ``value``; None if it is no such object."""
        read = _reader(value)
        return None if read is None else cls(name, read, read(), _addresses(value))

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether the first value of a tensor is one of an array's."""
        return tensor.numel() > 0 and tensor.data_ptr() in self.at


def is_array(value: Any) -> bool:
    """Whether it is an array of Python's or numpy's."""
    return isinstance(value, (bytearray, array)) or _is_of_numpy(value)


def _is_of_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _reader(value: Any) -> Callable[[], Values] | None:
    if (_is_of_numpy(value) or isinstance(value, memoryview)) and value.nbytes > LARGE:
        return None
    if _is_of_numpy(value):
        return lambda: (value.shape, str(value.dtype), *_elements(value))
    if isinstance(value, (bytearray, array)):
        return lambda: (bytes(value),)
    if isinstance(value, memoryview):
        return lambda: (value.tobytes(),)
    if isinstance(value, ContextVar):
        return lambda: (value.get(None),)
    return (lambda: tuple(os.environ.items())) if value is os.environ else None


def _elements(value: Any) -> Values:
    """The values of an array of numpy's: objects, or bytes."""
    return tuple(value.ravel().tolist()) if value.dtype.hasobject else (value.tobytes(),)


def _addresses(value: Any) -> range:
    if not _is_of_numpy(value):
        return range(0)
    begin = value.__array_interface__["data"][0]
    return range(begin, begin + value.nbytes)
