"""``ReadSite``: an entry of a dict, an attribute or a closure's cell that the step read."""

from __future__ import annotations

import enum
import types
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

MISSING = object()  # the value at a site that has none
_PLAIN = (
    *(int, float, complex, str, bytes, type, enum.Enum, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _cell_contents(cell: types.CellType, _: str, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return default


def _names(fields: dict[str, Any], _: str, default: Any) -> Any:
    return tuple(fields)


def _class(reference: weakref.ref[Any], _: str, default: Any) -> Any:
    found = reference()
    return default if found is None else found.__class__


def _item_now(reference: Reference, key: Any, default: Any) -> Any:
    return entry_of(reference.get(), key, default)


def entry_of(found: Any, key: Any, default: Any = MISSING) -> Any:
    """The entry of a dict or list; ``default`` if it has none."""
    if isinstance(found, list):
        return found[key] if key < len(found) else default
    if not isinstance(found, dict):
        return default
    start = starts_at(found)
    return found.get(key, default if start is MISSING else start)


def starts_at(items: dict[Any, Any]) -> Any:
    """The number that a dict has for a key that is not there, as a ``Counter`` has; else ``MISSING``."""
    if isinstance(items, Counter):
        return 0
    factory = items.default_factory if isinstance(items, defaultdict) else None
    return factory() if factory in (int, float) else MISSING


READERS: dict[str, Callable[..., Any]] = {  # by kind of site, each called with (source, key, default)
    "item": dict.get,
    "item now": _item_now,
    "entry": types.MappingProxyType.get,
    "attribute": getattr,
    "cell": _cell_contents,
    "names": _names,
    "class": _class,
}


@dataclass(frozen=True, eq=False)  # equal by its fields it would compare the tensors that holders have
class ReadSite:
    """One site; ``name`` describes it in the user's words. Two are of one place if their addresses are equal."""

    # "item" of a dict, "item now" of the dict or list that a ``Reference`` has, "entry" of a class, "attribute" of an
    # object, "cell", "names" of all items, or "class" of an object that is not kept alive
    kind: str
    holder: Any
    key: Any  # a string, but for items
    name: str
    owned: bool = False  # by a module or optimizer, whose changes ``../effects`` finds

    @property
    def address(self) -> tuple[Any, Any]:
        """Equal for one site only."""
        return self.holder.address if isinstance(self.holder, Reference) else id(self.holder), self.key

    @property
    def source(self) -> Any:
        """The object that ``READERS`` read the value from."""
        return vars(self.holder) if self.kind == "entry" else self.holder

    def weak(self) -> ReadSite:
        """The same site, which keeps no object alive whose class it is; nor do the dicts of attributes."""
        try:
            return self if self.key != "__class__" else replace(self, kind="class", holder=weakref.ref(self.holder))
        except TypeError:  # it can have no weak references
            return self

    def get(self) -> Any:
        """The value now, or ``MISSING``."""
        return READERS[self.kind](self.source, self.key, MISSING)

    def put(self, value: Any) -> None:
        """Write ``value``; ``MISSING`` removes the entry."""
        if self.kind == "cell" and value is MISSING:
            del self.holder.cell_contents
        elif self.kind == "cell":
            self.holder.cell_contents = value
        elif self.kind in ("attribute", "entry"):
            delattr(self.holder, self.key) if value is MISSING else setattr(self.holder, self.key, value)
        else:
            items = self.holder.get() if isinstance(self.holder, Reference) else self.holder
            if value is MISSING:
                items.pop(self.key, None)
            else:
                items[self.key] = value


@dataclass(frozen=True, eq=False)
class Reference:
    """A site, or an item of a list or dict, that holds a container, or a state tensor besides its module."""

    name: str
    holder: Any  # a ``ReadSite``, a list or a dict
    key: Any = None

    @property
    def address(self) -> tuple[Any, Any]:
        """Equal for one reference only."""
        return self.holder.address if isinstance(self.holder, ReadSite) else id(self.holder), self.key

    def get(self) -> Any:
        """The value there now; ``MISSING`` if there is none."""
        if isinstance(self.holder, ReadSite):
            return self.holder.get()
        try:
            return self.holder[self.key]
        except LookupError:
            return MISSING

    def find(self, arguments: Any) -> Any:
        """The value there in a call, whatever its arguments."""
        return self.get()

    def put(self, value: Any) -> None:
        """Put another tensor or container there."""
        if isinstance(self.holder, ReadSite):
            self.holder.put(value)
        else:
            self.holder[self.key] = value


@dataclass(frozen=True, eq=False)
class KeyReference(Reference):
    """A key of a dict that is a state tensor; ``key``: a list with the one that is there now."""

    def get(self) -> Any:
        """The key; ``MISSING`` if it is gone."""
        (key,) = self.key
        return key if key in self.holder else MISSING

    def put(self, value: Any) -> None:
        """Put another tensor in its place, in the same order."""
        (before,) = self.key
        items = [(value if key is before else key, item) for key, item in dict.items(self.holder)]
        write = OrderedDict.__setitem__ if isinstance(self.holder, OrderedDict) else dict.__setitem__
        self.holder.clear()
        for key, item in items:
            write(self.holder, key, item)
        self.key[:] = [value]


def is_plain(value: Any) -> bool:
    """Whether a value is compared as it is: a number, a string, a dtype, a class, None."""
    return value is None or value is ... or isinstance(value, _PLAIN)
