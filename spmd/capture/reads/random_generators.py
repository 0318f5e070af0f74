"""Random generators of Python and numpy that the step reaches: a draw would be a constant of the program.

Each is compared after the trace with what it was before, and put back, however the step came to draw from it.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from passes import CaptureError

from ..effects.lines import line_naming


@dataclass(frozen=True)
class _Generator:
    """One generator; ``key`` is the name by which the step's code reads it, ``before`` its state before the step."""

    name: str
    key: str
    get: Callable[[], Any]
    put: Callable[[Any], None]
    before: Any


class RandomGenerators:
    """The generators that one trace reaches."""

    def __init__(self) -> None:
        self._found: list[_Generator] = []
        self._moved: list[_Generator] = []

    def note(self, value: Any, name: str, key: str) -> None:
        """Note ``value`` with its state, if it is a generator with a state that can be put back."""
        access = _access(value)
        if access is not None:
            get, put = access
            try:
                self._found.append(_Generator(name, key, get, put, get()))
            except NotImplementedError:  # one of the operating system has none
                return

    def restore(self) -> None:
        """Put those back that the step drew from, or gave a seed."""
        self._moved = [each for each in self._found if _frozen(each.get()) != _frozen(each.before)]
        for each in self._moved:
            each.put(each.before)

    def check(self, code: Iterable[types.CodeType]) -> None:
        """Raise ``CaptureError`` if the step drew from one; ``code`` is what ran."""
        for each in self._moved:
            line = line_naming(code, each.key)
            raise CaptureError(
                f"the step draws from {each.name}, and each call of its program would get the same numbers again: draw "
                "with torch (torch.rand(()), say), or draw outside of the step and pass the result as an argument"
                + (f"\n    {line}" if line else "")
            )


def _access(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """(read, write) of its state."""
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
