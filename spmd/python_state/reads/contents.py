"""Contents of arrays, all other memory, context variables, events and the environment: values that lie at no site.

They are read by code in C, so that nobody sees which of them a step reads: the whole is compared at each call.
"""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from .read_sites import MISSING, is_plain

Values = tuple[Any, ...]
LARGE = 1 << 26  # bytes of an array of which no copy is made: it may be a data set
_EVENTS = {"threading.Event", "multiprocessing.synchronize.Event", "asyncio.locks.Event"}


@dataclass(frozen=True, eq=False)
class Contents:
    """One such object, with what it held before the step; ``at``: the addresses of an array's values."""

    name: str
    read: Callable[[], Values]
    before: Values
    at: range
    is_of_environment: bool = False

    @classmethod
    def of(cls, value: Any, name: str) -> Contents | None:
        """The contents of ``value``; None if it is no such object."""
        read = _reader(value)
        return None if read is None else cls(name, read, read(), _addresses(value), value is os.environ)

    @classmethod
    def of_results(cls, function: Any, name: str) -> Contents:
        """Contents of a function's cache, in no order: its own is that of the last uses."""

        def read() -> Values:
            return (*sorted(results_of(function), key=id),)

        return cls(name, read, read(), range(0))

    @classmethod
    def of_cached_tensor(cls, function: Any, tensor: torch.Tensor, name: str) -> Contents:
        """Whether the cache of a function still holds a tensor."""

        def read() -> Values:
            return (any(each is tensor for each in tensors_of_cache(function)),)

        return cls(name, read, read(), range(0))

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether the first value of a tensor is one of an array's."""
        return tensor.numel() > 0 and tensor.data_ptr() in self.at


def is_array(value: Any) -> bool:
    """Whether it is an array of Python's or numpy's."""
    return isinstance(value, (bytearray, array)) or _is_of_numpy(value, "ndarray")


def _is_event(value: Any) -> bool:
    """Whether it is an event of threads, processes or coroutines."""
    return any(f"{cls.__module__}.{cls.__qualname__}" in _EVENTS for cls in type(value).__mro__)


def _memory_of(value: Any) -> memoryview | None:
    """The memory of an object that the user can write to, as ctypes and ``multiprocessing`` make; None if it has none.

    Of one that was made by numpy and is no array, that of a row of a structured array.
    """
    if _is_of_numpy(value, "generic") and not _is_of_numpy(value, "void"):
        return None
    shared = sys.modules.get("multiprocessing.sharedctypes")
    if shared is not None and isinstance(value, shared.SynchronizedBase):
        value = value.get_obj()
    try:
        return memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None


def objects_in(value: Any) -> list[Any]:
    """Objects in an array of objects or in a context variable."""
    if isinstance(value, ContextVar):
        return [_value_of(value)]
    return value.ravel().tolist() if _is_of_numpy(value, "ndarray") and value.dtype.hasobject else []


def results_of(function: Any) -> list[Any]:
    """Results in the cache of a function, but for values that cannot change, and tensors."""
    return [each for each in _all_results_of(function) if not _is_fixed(each)]


def tensors_of_cache(function: Any) -> list[torch.Tensor]:
    """The tensors that the cache of a function holds, also in tuples; those in lists and dicts are entries of these."""
    pending, found = _all_results_of(function), list[torch.Tensor]()
    while pending:
        each = pending.pop()
        found += [each] if isinstance(each, torch.Tensor) else []
        pending += each if isinstance(each, tuple) else ()
    return found


def _all_results_of(function: Any) -> list[Any]:
    count, most = function.cache_info().currsize, function.cache_info().maxsize
    held = gc.get_referents(function) if count else []
    dicts = [each for each in held if type(each) is dict and each is not vars(function)]
    if most is not None:  # the dict has links, which are no objects of the collector: it lists what they hold
        dicts = [each for each in dicts if {type(link).__name__ for link in each.values()} == {"_lru_list_elem"}]
        apart = {id(each) for each in [*dicts, *(key for each in dicts for key in each), vars(function)]}
        apart |= {id(function.__wrapped__)}
        return [each for each in held if id(each) not in apart and type(each) is not object]
    return list(dicts[0].values()) if dicts else []


def _is_fixed(value: Any) -> bool:
    is_value = is_plain(value) or isinstance(value, torch.Tensor)
    return is_value or (isinstance(value, tuple) and all(map(_is_fixed, value)))


def _value_of(variable: ContextVar[Any]) -> Any:
    """The value of a context variable, which may be its default; ``MISSING`` if it has none."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _is_of_numpy(value: Any, kind: str) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, kind))


def _reader(value: Any) -> Callable[[], Values] | None:
    if _is_of_numpy(value, "ndarray"):
        return None if value.nbytes > LARGE else lambda: (value.shape, str(value.dtype), *_elements(value))
    if isinstance(value, ContextVar):
        return lambda: (_value_of(value),)
    if value is os.environ:
        return lambda: tuple(os.environ.items())
    if _is_event(value):
        return lambda: (value.is_set(),)
    memory = _memory_of(value)
    return None if memory is None or memory.nbytes > LARGE else lambda: (_bytes_of(value),)


def _bytes_of(value: Any) -> bytes:
    memory = _memory_of(value)
    return b"" if memory is None else memory.tobytes()


def _elements(value: Any) -> Values:
    """The values of an array of numpy's: objects, or bytes."""
    return tuple(value.ravel().tolist()) if value.dtype.hasobject else (value.tobytes(),)


def _addresses(value: Any) -> range:
    if not _is_of_numpy(value, "ndarray"):
        return range(0)
    begin = value.__array_interface__["data"][0]
    return range(begin, begin + value.nbytes)
