"""Random generators and arrays of the host that the step reaches: what it draws or writes, no call would repeat.

Each is compared after the trace with what it was before, and put back, however the step came to change it.
"""

from __future__ import annotations

import array
import random
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from passes import CaptureError

from ..lines import line_naming
from .contents import LARGE, is_array

_DRAWS = (
    "the step draws from {name}, and each call of its program would get the same numbers again: draw with torch "
    "(torch.rand(()), say), or draw outside of the step and pass the result as an argument"
)
_WRITES = (
    "the step writes to {name}, which a compiled step would do only once, while it is traced: return the value, and "
    "write it outside of the step, or make the array in the step"
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
    """The random generators, and the arrays of Python's and numpy's, that one trace reaches."""

    def __init__(self) -> None:
        self._found: list[_Object] = []
        self._moved: list[_Object] = []

    def note(self, value: Any, name: str, key: str) -> None:
        """Note ``value`` with its state, if it is one of them, and has a state that can be put back."""
        access = _access(value)
        if access is not None:
            get, put = access
            try:
                reason = _WRITES if is_array(value) else _DRAWS
                self._found.append(_Object(name, key, get, put, get(), reason))
            except NotImplementedError:  # one of the operating system has none
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
            raise CaptureError(each.reason.format(name=each.name) + (f"\n    {line}" if line else ""))


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """(read, write) of its state."""
    if isinstance(value, (bytearray, array.array)):
        return lambda: value[:], lambda before: value.__setitem__(slice(None), before)
    if is_array(value):
        is_watched = value.flags.writeable and not value.dtype.hasobject and value.nbytes <= LARGE
        return (value.copy, lambda before: value.__setitem__(..., before)) if is_watched else None
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
    return state.tobytes() if hasattr(state, "tobytes") else state
