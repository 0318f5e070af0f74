"""Stand-ins for objects that no call can move on as the step did: iterators that were there before the step.

While the step is traced, a stand-in lies wherever the step reaches such an object. It passes everything on, but for
what would move the object: that raises at the user's line, before anything has changed.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from passes import CaptureError

from ...foreign_code import is_foreign_file
from ...source_lines import user_line

_ITERATORS = frozenset({"send", "throw", "close"})
_ITERATES = (
    "takes the next value of {name}, which each call of its program would get again: pass the value as an argument, "
    "or take it outside of the step and keep it in an attribute"
)


class Refusing:
    """Stands in the place of ``value``; ``methods`` are refused, by the reason."""

    def __init__(self, value: Any, methods: dict[str, str], refuse: Callable[[str], NoReturn]) -> None:
        self._value, self._methods, self._refuse, self._thread = value, methods, refuse, threading.get_ident()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance
        return type(self._value)

    def __getattr__(self, key: str) -> Any:
        return self._refused(key) if key in self._methods else getattr(self._value, key)

    def __repr__(self) -> str:
        return repr(self._value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value.__reduce_ex__(protocol)

    def _refused(self, key: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self._refuse(self._methods[key])
            return getattr(self._value, key)(*args, **kwargs)

        return refused


class RefusingIterator(Refusing):
    """Stands in the place of an iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._refused("__next__")()


class Refusals:
    """The stand-ins of one trace, by the id of the object, and what they raised."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Refusing]] = {}
        self._raised: list[CaptureError] = []
        self.in_vain: list[str] = []  # names of what needs a stand-in and lies where none can be put

    def stand_in(self, value: Any, name: str) -> Any:
        """What stands in the place of ``value``; None if it needs nothing."""
        if isinstance(value, types.MethodWrapperType):  # ``it.__next__``
            owner = self.stand_in(value.__self__, name)
            return None if owner is None else getattr(owner, value.__name__)
        if id(value) in self._by_id:
            return self._by_id[id(value)][1]
        if not _is_iterator(value):
            return None
        methods = dict.fromkeys({"__next__", *_ITERATORS}, _ITERATES)
        made = RefusingIterator(value, methods, lambda reason: self.refuse(f"the step {reason.format(name=name)}"))
        self._by_id[id(value)] = value, made
        return made

    def refuse(self, message: str) -> NoReturn:
        """Raise ``CaptureError`` at the user's line; ``check`` raises it again if the step's code catches it."""
        self._raised.append(CaptureError(f"{message}\n    {user_line(sys._getframe(2))}"))
        raise self._raised[-1]

    def check(self) -> None:
        """Raise what the step caught, and refuse what no stand-in could watch."""
        if self._raised:
            raise self._raised[0]
        if self.in_vain:
            raise CaptureError(
                f"the step reads {self.in_vain[0]}, an iterator in a tuple or a set, whose next value each call of its "
                "program would get again: keep it outside of the step, and pass its values as arguments"
            )


def passed_on(value: Any) -> Any:
    """The object itself, where ``value`` stands in its place."""
    return value._value if type(value) in (Refusing, RefusingIterator) else value


def _is_iterator(value: Any) -> bool:
    """Whether something steps through its values that cannot be watched: not a ``__next__`` of the user's."""
    step = None if isinstance(value, type) else getattr(type(value), "__next__", None)
    if isinstance(step, types.FunctionType):
        return is_foreign_file(step.__code__.co_filename)
    return step is not None
