"""Snapshots of containers and of objects' attributes, to find and undo what a step changes while it is traced."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from operator import is_
from typing import Any

from .read_sites import MISSING

CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)


@dataclass(frozen=True)
class ContainerSnapshot:
    """The entries of a container when the trace reached it; ``content`` is None if they cannot change."""

    name: str
    value: Any
    content: tuple[Any, ...] | None
    owned: bool  # by a module or optimizer, whose changes ``side_effects.py`` reports

    def changed(self) -> bool:
        """Whether the container holds other entries now."""
        now = content_of(self.value)
        before = self.content
        return before is not None and (now is None or len(now) != len(before) or not all(map(is_, now, before)))

    def restore(self) -> None:
        """Give the container its entries back."""
        self.value.clear()
        content: Any = self.content
        if isinstance(self.value, dict):
            half = len(content) // 2
            self.value.update(zip(content[:half], content[half:], strict=True))
        else:
            (self.value.update if isinstance(self.value, set) else self.value.extend)(content)


@dataclass(frozen=True)
class FieldsSnapshot:
    """The attributes of an object or a function when the trace reached it."""

    name: str
    holder: Any
    before: dict[str, Any]

    def changed(self) -> list[str]:
        """The attributes that are new or have another value now."""
        return [key for key, value in vars(self.holder).items() if value is not self.before.get(key, MISSING)]

    def restore(self, key: str) -> None:
        """Give one attribute its value back, or remove it."""
        if key in self.before:
            vars(self.holder)[key] = self.before[key]
        else:
            del vars(self.holder)[key]


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """The entries of a container, by key or position."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def content_of(value: Any) -> tuple[Any, ...] | None:
    """The entries of a container that can change, for later comparison; None of anything else."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return tuple(value) if isinstance(value, (list, set, collections.deque)) else None
