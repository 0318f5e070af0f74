"""Snapshots of containers and of objects' attributes, to find and undo what a step changes while it is traced."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from operator import is_
from typing import Any

from .read_sites import MISSING

CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


@dataclass(frozen=True, eq=False)
class ContainerSnapshot:
    """The entries of a container when the trace reached it; ``content`` is None if they cannot change."""

    name: str
    value: Any
    content: tuple[Any, ...] | None
    owned: bool  # by a module or optimizer, whose changes ``../effects`` finds

    def changed(self) -> bool:
        """Whether the container holds other entries now."""
        now = content_of(self.value)
        before = self.content
        return before is not None and (now is None or len(now) != len(before) or not all(map(is_, now, before)))

    def is_keyed(self) -> bool:
        """Whether entries are written by key, or push others out."""
        return isinstance(self.value, (dict, collections.deque))

    def grew(self) -> bool:
        """Whether something was added to a list, a deque or a set."""
        now = content_of(self.value)
        return not isinstance(self.value, dict) and len(now or ()) > len(self.content or ())

    def restore(self) -> None:
        """Give the container its entries back."""
        self.value.clear()
        content: Any = self.content
        if isinstance(self.value, dict):
            half = len(content) // 2
            dict.update(self.value, zip(content[:half], content[half:], strict=True))  # a Counter's would add
        else:
            (self.value.update if isinstance(self.value, set) else self.value.extend)(content)


@dataclass(frozen=True, eq=False)
class FieldsSnapshot:
    """The attributes of an object or a function when the trace reached it."""

    name: str
    holder: Any
    before: dict[str, Any]

    def changed(self) -> list[str]:
        """The attributes that are new, gone, or have another value now."""
        now = vars(self.holder)
        return [key for key in {**self.before, **now} if now.get(key, MISSING) is not self.before.get(key, MISSING)]


def containers_in(value: Any) -> list[Any]:
    """The containers that can change among ``value`` and what is nested in it, outermost first."""
    found: list[Any] = []
    pending, seen = [value], set[int]()
    while pending:
        each = pending.pop(0)
        if isinstance(each, CONTAINERS) and id(each) not in seen:
            seen.add(id(each))
            found += [each] if content_of(each) is not None else []
            pending += _stored_in(each)
    return found


def _stored_in(container: Any) -> list[Any]:
    """Values stored in a container, not those that a subclass makes anew when it is read: they would never end."""
    if isinstance(container, dict):
        return list(dict.values(container))
    kind: Any = next(kind for kind in CONTAINERS if isinstance(container, kind))
    return list(kind.__iter__(container))


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """The entries of a container, by key or position."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def content_of(value: Any) -> tuple[Any, ...] | None:
    """The entries of a container that can change, for later comparison; None of anything else."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return tuple(value) if isinstance(value, (list, set, collections.deque)) else None
