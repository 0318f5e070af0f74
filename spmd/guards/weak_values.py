"""Values compared by identity and not kept alive: models, and objects that hold some, at sites that a trace read."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ..call.found import OWNERS
from ..python_state.reads import is_plain
from .equality import structurally_equal

_CONTAINERS = (list, tuple, dict)


@dataclass(frozen=True)
class _Entries:
    """A list, tuple or dict with weak references in it."""

    cls: type
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class WeakValues:
    """Refers weakly to models, optimizers, scalers, and to ``holders`` of some, given by id."""

    holders: Collection[int]

    def containers(self, value: Any) -> Iterator[Any]:
        """The containers in ``value``, itself included, that lead to something to refer to weakly.

        ``matches`` compares their entries. Of the others in them it sees which they are, not what they hold.
        """
        pending, seen = [value], dict[int, Any]()
        while pending:
            each = pending.pop()
            if isinstance(each, _CONTAINERS) and id(each) not in seen:
                seen[id(each)] = each
                pending += _items(each)
                if self.of(each) is not each:
                    yield each

    def of(self, value: Any, within: tuple[int, ...] = ()) -> Any:
        """The form of ``value`` that ``matches`` compares with; ``value`` where there is nothing to refer to weakly."""
        if self._is_one(value):
            return weakref.ref(value)
        if not isinstance(value, _CONTAINERS) or id(value) in within:
            return value
        values = tuple(self.of(item, (*within, id(value))) for item in _items(value))
        if all(new is old for new, old in zip(values, _items(value), strict=True)):
            return value
        return _Entries(type(value), tuple(value) if isinstance(value, dict) else (), values)

    def _is_one(self, value: Any) -> bool:
        if type(value) in weakref.ProxyTypes:  # weak already
            return False
        return isinstance(value, OWNERS) or id(value) in self.holders


@dataclass(frozen=True)
class AnyOf:
    """Any container of a class: the step writes to it, and reads nothing of it."""

    cls: type


def matches(now: Any, expected: Any) -> bool:
    """Whether ``now`` is what was given to ``WeakValues.of``, or equal to it where it is no object of the user's."""
    if isinstance(expected, AnyOf):
        return type(now) is expected.cls
    if isinstance(expected, weakref.ref):
        return now is not None and expected() is now
    if not isinstance(expected, _Entries):
        return unchanged(now, expected)
    if type(now) is not expected.cls or (isinstance(now, dict) and tuple(now) != expected.keys):
        return False
    items = _items(now)
    return len(items) == len(expected.values) and all(map(matches, items, expected.values))


def unchanged(now: Any, value: Any) -> bool:
    """Whether ``now`` is what ``value`` was: the very object, or of numbers and lists of them, an equal one."""
    return now is value or (
        (is_plain(value) or type(value) in (list, dict) or isinstance(value, tuple)) and structurally_equal(now, value)
    )


def described(expected: Any) -> str:
    """An expected value in a message."""
    if isinstance(expected, weakref.ref):
        return f"another {type(expected()).__name__}" if expected() is not None else "an object that is gone"
    if isinstance(expected, AnyOf):
        return f"a {expected.cls.__name__}"
    return f"another {expected.cls.__name__}" if isinstance(expected, _Entries) else repr(expected)


def _items(container: Any) -> Collection[Any]:
    return container.values() if isinstance(container, dict) else container
