"""Reads of classes, modules and functions: ``Config.tau``, ``type(self).scale``, ``helper.scale``.

Nothing can observe these reads. Instead, of every such namespace that the step reaches, those entries count whose names
occur in the user's code that ran.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any


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
            self._note(holder, self._names)

    def read_by(self, code: types.CodeType) -> None:
        """Add the names in ``code``, which starts; strings in it count too: ``getattr(Config, "tau")``."""
        new = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))} - self._names
        self._names |= new
        for holder in list(self._reached.values()):
            self._note(holder, new)

    def _note(self, holder: Any, names: Collection[str]) -> None:
        for key in vars(holder).keys() & names:
            if not key.startswith("__"):
                self.note(holder, key)
