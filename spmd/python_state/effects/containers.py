"""Lists, dicts, UserDicts and dataclasses among a step's arguments: what the step changes in them.

The step gets copies while it is traced. Each call repeats the changes on what the caller passed.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from ..._torch import tree_flatten
from ...call.tree import attributes_of, items_of
from ..reads import MISSING, Change, ReadSite

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class ArgumentEntry:
    """An entry of a container among the arguments, by the path to the container from ``(args, kwargs)``."""

    path: Path
    key: Any
    name: str

    def put(self, arguments: Any, value: Any) -> None:
        """Write ``value`` where the caller's container has the entry; ``MISSING`` removes it."""
        container = arguments
        for key in self.path:
            container = _entries(container)[key]
        if isinstance(container, (dict, UserDict, list)):
            _put(container, self.key, value)
        elif value is MISSING:
            delattr(container, self.key)
        else:
            object.__setattr__(container, self.key, value)


@dataclass(frozen=True, eq=False)
class Containers:
    """The containers in a tree of arguments, each with its path and its entries before the step."""

    found: list[tuple[Path, Any, dict[Any, Any]]]

    @classmethod
    def of(cls, arguments: Any, leaves: Container[int]) -> Containers:
        """The containers of ``(args, kwargs)``; nothing is one of them whose id is among ``leaves``."""
        return cls([(path, each, _entries(each)) for path, each in _walk(arguments, (), leaves)])

    def changes(self, names: dict[int, str]) -> Iterator[tuple[ArgumentEntry, Change]]:
        """Entries that are new, gone or replaced; ``names`` are those of leaves, by id."""
        for path, container, before in self.found:
            now = _entries(container)
            for key in {**before, **now}:
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                if new is not old:
                    name = names.get(id(old)) or ".".join(map(str, (*path[1:], key)))
                    site = ReadSite("item", container, key, name)
                    yield ArgumentEntry(path, key, name), Change(site, old, new, False, tree_flatten(old)[0], container)


def logs_among(entries: Iterable[tuple[ArgumentEntry, Change]]) -> set[Path]:
    """The paths of lists that grew, and of dicts that got new entries: they may be logs."""
    return {entry.path for entry, change in entries if change.before is MISSING and type(change.owner) in (list, dict)}


def _walk(value: Any, path: Path, leaves: Container[int]) -> Iterator[tuple[Path, Any]]:
    if id(value) in leaves:
        return
    if isinstance(value, (dict, UserDict, list)) or (is_dataclass(value) and not isinstance(value, type)):
        yield path, value
    elif not isinstance(value, tuple):
        return
    for key, each in _entries(value).items():
        yield from _walk(each, (*path, key), leaves)


def _entries(container: Any) -> dict[Any, Any]:
    if isinstance(container, (dict, UserDict)):
        return items_of(container)
    if isinstance(container, (list, tuple)):
        return dict(enumerate(container))
    return {name: getattr(container, name) for name in attributes_of(container)}


def _put(container: Any, key: Any, value: Any) -> None:
    container = container.data if isinstance(container, UserDict) else container
    if value is MISSING:
        del container[key]
    elif isinstance(container, list) and key == len(container):
        container.append(value)
    else:
        container[key] = value
