"""Journals: lists, dicts and deques that a step writes to and does not read, such as logs.

While a step is traced, a recording subclass stands in for each of them, wherever the step reaches it. It has none of
the entries that were there before: it records what is written, in order, and each call repeats that on the live
container. What the step wrote itself it may read again. Numbers and tensors in a dict that it reads become inputs of
the program, and what it leaves there is written as to an attribute. If it reads anything else, the container is no log,
and the step is traced again without a journal for it.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..._torch import FakeTensor, register_pytree_node, tree_flatten, tree_unflatten, version_of
from ...interpreter.foreign_code import is_foreign_frame
from ...interpreter.source_lines import user_line
from .changes import Change
from .logging_calls import LogCall, recorded_logging
from .read_sites import ReadSite, Reference
from .refusing import passed_on


@dataclass(frozen=True, eq=False)
class Written:
    """One write: a method that the step called on a container, and the user's line."""

    journal: Journal | LogCall | None  # None for a call of ``print``
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str
    versions: tuple[tuple[torch.Tensor, int], ...] = ()  # of tensors that are shown as they were at the write

    def changed(self) -> bool:
        """Whether the step wrote into such a tensor afterwards."""
        return any(version_of(tensor) != version for tensor, version in self.versions)


class Lines(NamedTuple):
    """The user's lines that write to a container, and that read it; empty if they are not known."""

    writes: str = ""
    reads: str = ""


_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


class _Missing:
    """Stands in a recording list for the entries that were there before: no op takes it for a tensor."""


@dataclass(eq=False)
class Journal:
    """One live container with what stands in for it; ``references`` are where the step came to it."""

    live: Any
    journals: Journals
    references: list[Reference] = field(default_factory=list)
    arguments: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)  # the name and path of each that it is
    written_at: str = ""
    read_at: str = ""  # the user's line that reads what was there before; empty if none does
    is_cleared: bool = False
    has_unknown_keys: bool = False  # a number that each call reads is a key
    entries: dict[Any, Entry] = field(default_factory=dict)  # of a dict, that were there before and are read, by key
    stand_in: Any = None

    def __post_init__(self) -> None:
        self.stand_in = _CLASSES[type(self.live)]()
        self.stand_in._journal = self

    def record(self, method: str, *args: Any) -> None:
        """Note a write, with the user's line."""
        line = user_line(sys._getframe(2))
        self.written_at = self.written_at or line
        if not self.read_at:
            self.journals.written.append(Written(self, method, args, {}, line))

    @property
    def lines(self) -> Lines:
        """The first lines that write and read."""
        return Lines(self.written_at, self.read_at)

    def read(self, line: str = "") -> None:
        """The step reads what was there before, at ``line``: show it, and record nothing any more."""
        if self.read_at or (self.is_cleared and not self.has_unknown_keys):
            return
        self.read_at = line or user_line(sys._getframe(1)) or "a line of torch"
        self.journals.shown(self.live)
        self.stand_in._show(self.live)

    def read_entry(self, key: Any) -> bool:
        """Show one entry of a dict, if it may become an input or is one already; returns whether it does."""
        if not isinstance(key, (str, int)) or self.is_cleared or self._is_elsewhere():
            return False
        value = self.live.get(key)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            if not _may_be_input(value):
                return False
            self.journals.carry([self._site(k) for k, each in self.live.items() if _may_be_input(each)])
        elif not isinstance(value, FakeTensor) and type(value) not in _NUMBERS:
            return False
        self.entries[key] = Entry(value, user_line(sys._getframe(1)) or "a line of torch")
        dict.__setitem__(self.stand_in, key, value)
        return True

    def check_entries(self) -> None:
        """Take entries for read that cannot be inputs after all: of what is found in two places, or was emptied."""
        if self.entries and (self.is_cleared or self._is_elsewhere()):
            self.read(next(iter(self.entries.values())).line)

    def changes(self) -> Iterator[Change]:
        """The entries of a dict that the step reads, each with the value that the step leaves there."""
        for key, each in self.entries.items():
            after = dict.get(self.stand_in, key)
            yield Change(self._site(key), each.value, after, True, [each.value])

    def _site(self, key: Any) -> ReadSite:
        found = self.references[0]
        return ReadSite("item now", found, key, f"{found.name}[{key!r}]")

    def _is_elsewhere(self) -> bool:
        """Whether the step comes to the dict in two ways, or as to an argument: they may part later."""
        return bool(self.arguments) or len({each.address for each in self.references}) != 1


class Entry(NamedTuple):
    """An entry that the step reads: what it gets, and the user's line."""

    value: Any
    line: str


def _may_be_input(value: Any) -> bool:
    """Whether a tensor in a dict may become an input: no state of a model, and none with a graph, or that had one."""
    plain = type(value) is torch.Tensor or isinstance(value, DTensor)
    return plain and not value.requires_grad and not isinstance(value, torch.nn.Parameter) and not vars(value)


class Journals:
    """The journals of one trace, by the id of the live container, and what was written to all of them, in order."""

    def __init__(self, containers: Iterable[Any] = (), refused: Mapping[int, Lines] | None = None) -> None:
        self.by_id = {id(each): Journal(each, self) for each in containers}
        self.refused = refused or {}  # containers that the step reads, too, by id
        self.written: list[Written] = []
        self.shown: Callable[[Any], None] = lambda live: None  # called before the step sees what a container holds
        self.carry: Callable[[list[ReadSite]], None] = lambda sites: None  # raises, so that these become inputs

    def changes(self) -> list[Change]:
        """The entries of dicts that the step reads, each with the value that the step leaves there."""
        return [change for journal in self.by_id.values() for change in journal.changes()]

    def logged(self) -> list[Written]:
        """All writes, in order, but those to entries that the step reads."""
        return [each for each in self.written if not _is_of_entry(each)]

    def read(self) -> dict[int, Lines]:
        """The containers that were read, by id."""
        for journal in self.by_id.values():
            journal.check_entries()
        found = {key: journal.lines for key, journal in self.by_id.items() if journal.read_at}
        # An argument that the step reaches otherwise, too, may be another object in the next call.
        twice = [
            key for key, each in self.by_id.items() if each.arguments and len(each.arguments) + len(each.references) > 1
        ]
        return {key: self.by_id[key].lines for key in twice} | found

    def all(self) -> dict[int, Lines]:
        """All containers that have a journal, by id."""
        return {key: journal.lines for key, journal in self.by_id.items()}

    @contextmanager
    def recorded_prints(self) -> Iterator[None]:
        """Record what the user's code prints, for the length of the context."""
        before, thread = builtins.print, threading.get_ident()

        def record(*args: Any, **kwargs: Any) -> None:
            if threading.get_ident() != thread or is_foreign_frame(sys._getframe(1)):
                before(*args, **kwargs)
                return
            self._record_shown(None, "__call__", args, kwargs, sys._getframe(1))

        builtins.print = record
        try:
            yield
        finally:
            builtins.print = before

    def recorded_logging(self) -> AbstractContextManager[None]:
        """Record what the user's code logs, for the length of the context."""
        return recorded_logging(lambda call, args, kwargs, frame: self._record_shown(call, "log", args, kwargs, frame))

    def _record_shown(
        self, call: LogCall | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> None:
        leaves, spec = tree_flatten((args, kwargs))  # lists and dicts as they are now
        args, kwargs = tree_unflatten(map(passed_on, leaves), spec)
        versions = tuple((leaf, version_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.written.append(Written(call, method, args, kwargs, user_line(frame), versions))

    def can_have(self, container: Any) -> bool:
        """Whether a container may have a journal, in another trace."""
        return type(container) in _CLASSES and not {id(container)} & {*self.refused, *self.by_id}


def _is_of_entry(written: Written) -> bool:
    journal = written.journal
    if not isinstance(journal, Journal) or written.method != "__setitem__":
        return False
    key = written.args[0]
    return not isinstance(key, torch.SymInt) and key in journal.entries


class Recording:
    """Base of the recording classes."""

    _journal: Journal


class _List(Recording, list[Any]):
    """A list that records."""

    def __init__(self) -> None:
        list.append(self, _Missing())

    def _show(self, live: list[Any]) -> None:
        list.__setitem__(self, slice(0, 1), live)

    def append(self, value: Any) -> None:
        self._journal.record("append", value)
        list.append(self, value)

    def extend(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._journal.record("extend", values)
        list.extend(self, values)

    def __iadd__(self, values: Iterable[Any]) -> Any:  # type: ignore[misc]
        self.extend(values)
        return self

    def __radd__(self, other: list[Any]) -> list[Any]:
        self._journal.read()
        return other + list(self)

    def clear(self) -> None:
        self._journal.record("clear")
        self._journal.is_cleared = True
        list.clear(self)

    def __getitem__(self, key: Any) -> Any:
        own = list.__len__(self) - (not self._journal.is_cleared)
        if not isinstance(key, int) or not -own <= key < 0:
            self._journal.read()
        return list.__getitem__(self, key)


class _Deque(Recording, deque[Any]):
    """A deque that records; how many entries it may hold only the live one knows."""

    def __init__(self) -> None:
        deque.append(self, _Missing())

    def _show(self, live: deque[Any]) -> None:
        own = list(deque.__iter__(self))[1:]
        deque.clear(self)
        deque.extend(self, deque([*live, *own], live.maxlen))

    @property
    def maxlen(self) -> int | None:
        maxlen: int | None = self._journal.live.maxlen
        return maxlen

    def append(self, value: Any) -> None:
        self._journal.record("append", value)
        deque.append(self, value)

    def extend(self, values: Iterable[Any]) -> None:
        values = list(values)
        self._journal.record("extend", values)
        deque.extend(self, values)

    def __iadd__(self, values: Iterable[Any]) -> Any:
        self.extend(values)
        return self


class _Dict(Recording, dict[Any, Any]):
    """A dict that records."""

    def _show(self, live: dict[Any, Any]) -> None:
        own = {key: dict.__getitem__(self, key) for key in dict.keys(self)}
        dict.clear(self)
        dict.update(self, {**live, **own})

    def __setitem__(self, key: Any, value: Any) -> None:
        self._journal.record("__setitem__", key, value)
        if isinstance(key, torch.SymInt):
            self._journal.has_unknown_keys = True
        else:
            dict.__setitem__(self, key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        self._journal.record("clear")
        self._journal.is_cleared = True
        dict.clear(self)

    def __getitem__(self, key: Any) -> Any:
        self._look(key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._look(key)
        return dict.get(self, key, default)

    def __contains__(self, key: object) -> bool:
        self._look(key)
        return dict.__contains__(self, key)

    def _look(self, key: Any) -> None:
        """The step asks for an entry: of those that it wrote itself it may have any."""
        if self._journal.has_unknown_keys or (not dict.__contains__(self, key) and not self._journal.read_entry(key)):
            self._journal.read()


_CLASSES: dict[type, Callable[[], Any]] = {list: _List, dict: _Dict, deque: _Deque}
_KEPT = {
    *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__dir__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__hash__", "__doc__", "__dict__", "__weakref__"),
    *("__slots__", "__module__", "__orig_bases__", "__parameters__", "maxlen"),
}


def _reading(base: type, name: str) -> Callable[..., Any]:
    method = getattr(base, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._journal.read()
        return method(self, *args, **kwargs)

    return read


def _flatten(recording: Any) -> tuple[list[Any], None]:
    """Read what was there before: torch looks for the entries of nested containers."""
    recording._journal.read()
    return [], None


def _unflatten(values: Iterable[Any], context: None) -> Any:
    raise AssertionError("what is read is not kept in a journal")


for _base, _cls in ((list, _List), (dict, _Dict), (deque, _Deque)):
    for _name in dir(_base):
        if _name not in vars(_cls) and _name not in _KEPT:
            setattr(_cls, _name, _reading(_base, _name))
    register_pytree_node(_cls, _flatten, _unflatten)
