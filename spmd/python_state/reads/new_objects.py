"""``NewObjects``: which objects were made since a moment, found without a look at all those that were there before."""

from __future__ import annotations

import gc
import types
import weakref
from builtins import id as address  # a trace lends user code another one, which takes a second for a million objects
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .contents import is_array

# Never taken for new: the collector does not list every object of the first three, and the others hold no state.
_NEVER_NEW = (
    *(dict, tuple, frozenset),
    *(types.FunctionType, types.BuiltinFunctionType, types.CellType, weakref.ref),
)
_MANY = 2_000


class NewObjects:
    """The objects that Python's collector has come to track since ``watch`` began.

    They start in its youngest generation, which is empty at the start of ``watch`` and is noted before each collection.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()  # also of new objects that died: what has such an id now is new, too
        self._put: dict[int, Any] = {}  # of those that the collector does not list, by id

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note new objects for the length of the context."""
        gc.collect(0)
        gc.callbacks.append(self._before_a_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._before_a_collection)

    def note_put(self, value: Any) -> None:
        """Take for new what the step has put at a site: a dict, if the collector has come to track it since.

        And an array, which the collector does not track.
        """
        if type(value) is dict and address(value) not in self._ids:
            self._note_young()
        if is_array(value) or (type(value) is dict and address(value) in self._ids):
            self._put[address(value)] = value

    def __contains__(self, value: Any) -> bool:
        if address(value) in self._put:
            return True
        if isinstance(value, _NEVER_NEW):
            return False
        if address(value) not in self._ids:
            self._note_young()
        return address(value) in self._ids

    def _before_a_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._note_young()

    def _note_young(self) -> None:
        young = gc.get_objects(generation=0)
        self._ids.update(map(address, young))
        if len(young) > _MANY:  # the collector is off, or was set to come late: each look would take longer
            gc.collect(0)
