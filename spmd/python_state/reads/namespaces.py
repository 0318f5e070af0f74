"""Reads of classes, modules and functions: ``Config.tau``, ``type(self).scale``, ``helper.scale``.

Nothing can observe these reads. Instead, of every such namespace that the step reaches, those entries count whose names
occur in the user's code that ran, and methods that operators call (``__call__``, ``__len__``). Of a class those of its
bases count, too: an entry of its own would come before them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

_REPLACED = {"__getattribute__"}  # by the trace itself
_NOT_CALLED = {"__init__", "__repr__", "__dir__", "__setstate__", "__del__"}  # by an operator, while a step runs


@dataclass(eq=False)
class Namespaces:
    """The namespaces that a trace has reached, and the names in the user's code that ran so far."""

    note: Callable[[Any, str], None]  # called once for each entry that counts
    _reached: dict[int, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def reach(self, holder: Any) -> None:
        """Add a class, a module or a function of the user's."""
        if id(holder) not in self._reached:
            self._reached[id(holder)] = holder
            self._note(holder, self._names | _operators(holder))

    def read_by(self, code: types.CodeType) -> None:
        """Add the names in ``code``, which starts; strings in it count too: ``getattr(Config, "tau")``."""
        new = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))} - self._names
        self._names |= new
        for holder in list(self._reached.values()):
            self._note(holder, new)

    def _note(self, holder: Any, names: Set[str]) -> None:
        for each in _with_bases(holder):
            for key in (vars(each).keys() & names) - _REPLACED:
                if not key.startswith("__") or type(vars(each)[key]) is types.FunctionType:
                    self.note(holder, key)


def _with_bases(holder: Any) -> tuple[Any, ...]:
    return holder.__mro__[:-1] if isinstance(holder, type) else (holder,)


def _operators(holder: Any) -> set[str]:
    """The names of methods that operators call."""
    if not isinstance(holder, type):
        return set()
    entries = {key for each in _with_bases(holder) for key in vars(each)}
    return {key for key in entries if key.startswith("__") and key.endswith("__")} - _NOT_CALLED
