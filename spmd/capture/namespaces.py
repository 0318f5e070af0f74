"""Classes, modules and functions as settings: ``Config.tau``, ``type(self).scale``, ``helper.scale``.

Attributes are read off them in ways that nothing can watch. Which of their entries count is told by the code that runs:
those whose names stand in it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Namespaces:
    """Those that a trace has come to, and the names in the user's code that ran so far."""

    note: Callable[[Any, str], None]  # called once for each entry that counts
    _reached: dict[int, Any] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)

    def reach(self, holder: Any) -> None:
        """The step has come to a class, a module or a function of the user's."""
        if id(holder) not in self._reached:
            self._reached[id(holder)] = holder
            self._tell(holder, self._names)

    def read_by(self, code: types.CodeType) -> None:
        """``code`` starts. Texts in it count too: ``getattr(Config, "tau")``."""
        new = {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))} - self._names
        self._names |= new
        for holder in list(self._reached.values()):
            self._tell(holder, new)

    def _tell(self, holder: Any, names: Collection[str]) -> None:
        for key in vars(holder).keys() & names:
            if not key.startswith("__"):
                self.note(holder, key)
