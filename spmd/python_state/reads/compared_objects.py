"""Random generators, arrays and context variables that the step reaches: what it draws or writes, no call repeats.

Each is compared after the trace with what it was before, and put back, however the step came to change it.
"""

from __future__ import annotations

import array
import random
import sys
import types
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from passes import CaptureError

from ...call.refusals import refuse
from ..lines import line_naming
from .contents import LARGE, is_array

_DRAWS = (
    "the step draws from {name}, and each call of its program would get the same numbers again: draw with torch "
    "(torch.rand(()), say), or draw outside of the step and pass the result as an argument"
)
_WRITES = (
    "the step writes to {name}, which a compiled step would do only once, while it is traced: return the value, and "
    "write it outside of the step; or make the array in the step; or set a context variable back by its token"
)


@dataclass(frozen=True, eq=False)
class _Object:
    """One of them; ``key`` is the name by which the step's code reads it, ``before`` its state before the step."""

    name: str
    key: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    before: Any
    reason: str


class ComparedObjects:
    """The random generators, arrays and context variables that one trace reaches."""

    def __init__(self) -> None:
        self._found: list[_Object] = []
        self._moved: list[_Object] = []

    def note(self, value: Any, name: str, key: str) -> None:
        """Note ``value`` with its state, if it is one of them, and has a state that can be put back."""
        written, drawn = _written(value), _drawn(value)
        access = written or drawn
        if access is not None:
            get, put = access
            try:
                self._found.append(_Object(name, key, get, put, get(), _WRITES if written else _DRAWS))
            except (NotImplementedError, LookupError):  # one of the operating system; a variable that has no value
                return

    def restore(self) -> None:
        """Put those back that the step changed."""
        self._moved = [each for each in self._found if _frozen(each.get()) != _frozen(each.before)]
        for each in self._moved:
            each.put(each.before)

    def check(self, code: Iterable[types.CodeType]) -> None:
        """Raise ``CaptureError`` if the step changed one; ``code`` is what ran."""
        for each in self._moved:
            line = line_naming(code, each.key)
            refuse(CaptureError, each.reason.format(name=each.name) + (f"\n    {line}" if line else ""))


_Access = tuple[Callable[[], Any], Callable[[Any], Any]]  # (read, write) of an object's state


def _written(value: Any) -> _Access | None:
    """Of what holds values that a step may write."""
    if isinstance(value, (bytearray, array.array)):
        return lambda: value[:], lambda before: value.__setitem__(slice(None), before)
    if is_array(value):
        is_watched = value.flags.writeable and not value.dtype.hasobject and value.nbytes <= LARGE
        return (value.copy, lambda before: value.__setitem__(..., before)) if is_watched else None
    if isinstance(value, ContextVar):
        return lambda: (value.get(),), lambda before: value.set(*before)
    return None


def _drawn(value: Any) -> _Access | None:
    """Of random generators."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):
        return value.get_state, value.set_state
    bits = value.bit_generator if isinstance(value, numpy.Generator) else value
    if isinstance(bits, numpy.BitGenerator):
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _frozen(state: Any) -> Any:
    """Nested state with arrays, as values that compare."""
    if isinstance(state, dict):
        return tuple((key, _frozen(value)) for key, value in state.items())
    if isinstance(state, (tuple, list)):
        return tuple(map(_frozen, state))
    if isinstance(state, torch.Tensor):
        return id(state)
    return state.tobytes() if hasattr(state, "tobytes") else state
