"""Journals: lists, dicts and deques that a step writes to and does not read, such as logs.

While a step is traced, a recording subclass stands in for each of them, wherever the step reaches it. It has none of
the entries that were there before: it records what is written, in order, and each call repeats that on the live
container. What the step wrote itself it may read again. Numbers and tensors in a dict or list that it reads become
inputs of the program, and what it leaves there is written as to an attribute; that a dict lacks a key becomes a guard.
A list in a dict has a journal of its own. If the step reads anything else, the container is no log, and the step is
traced again without a journal for it.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
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
from .formatted import with_values, without_values
from .logging_calls import LogCall, recorded_logging
from .read_sites import MISSING, ReadSite, Reference, entry_of, starts_at
from .refusing import passed_on
from .snapshots import items_of


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
    entries: dict[Any, Entry] = field(default_factory=dict)  # that were there before and are read, by key or index
    absent: dict[Any, str] = field(default_factory=dict)  # keys that the step found missing, with the user's line
    parent: Journal | None = None  # of the dict that has this container
    stand_in: Any = None

    def __post_init__(self) -> None:
        self.stand_in = _CLASSES[type(self.live)]()
        self.stand_in._journal = self
        if isinstance(self.live, defaultdict):
            self.stand_in.default_factory = self.live.default_factory

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
        if self.parent is not None:
            self.parent.read(self.read_at)
        self.journals.shown(self.live)
        self.stand_in._show(self.live)

    def read_entry(self, key: Any) -> bool:
        """Show one entry, if it may become an input or is one already; returns whether it does."""
        if not self._may_look(key):
            return False
        value = entry_of(self.live, key)
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            if not _may_be_input(value):
                return False
            self.journals.carry([self._site(k) for k, each in items_of(self.live) if _may_be_input(each)])
        elif not isinstance(value, FakeTensor) and type(value) not in _NUMBERS:
            return False
        self.entries[key] = Entry(value, user_line(sys._getframe(1)) or "a line of torch")
        self.stand_in._own(key, value)
        return True

    def read_absence(self, key: Any) -> bool:
        """Note that the step found a dict without ``key``, if that can be guarded; returns whether it can."""
        if not self._may_look(key) or key in self.live:
            return False
        self.absent.setdefault(key, user_line(sys._getframe(1)) or "a line of torch")
        return True

    def log_in(self, key: Any, value: Any) -> Any:
        """The stand-in for a list or deque that is an entry of a dict, or becomes one; None if there can be none."""
        known = self.journals.by_id.get(id(value))
        if type(value) not in (list, deque) or id(value) in self.journals.refused:
            return None
        if self.read_at or not self._may_look(key):
            return None
        if known is None:
            known = self.journals.by_id[id(value)] = Journal(value, self.journals, parent=self)
        known.references.append(Reference(f"{self.references[0].name}[{key!r}]", self._site(key)))
        self.stand_in._own(key, known.stand_in)
        return known.stand_in

    def _may_look(self, key: Any) -> bool:
        """Whether a later call can look at a single entry."""
        plain = isinstance(key, (str, int)) and not isinstance(key, torch.SymInt)
        return plain and bool(self.references) and not self.is_cleared and not self._is_elsewhere()

    def check_entries(self) -> None:
        """Take entries for read that cannot be inputs after all: of what is found in two places, or was emptied."""
        lines = [*(each.line for each in self.entries.values()), *self.absent.values()]
        if lines and (self.is_cleared or self._is_elsewhere()):
            self.read(lines[0])

    def changes(self) -> Iterator[Change]:
        """The entries that the step reads, each with the value that the step leaves there."""
        for key, each in self.entries.items():
            after = self.stand_in._now(key)
            yield Change(self._site(key), each.value, after, True, [each.value])

    def _site(self, key: Any) -> ReadSite:
        found = self.references[0]
        return ReadSite("item now", found, key, f"{found.name}[{key!r}]")

    def _is_elsewhere(self) -> bool:
        """Whether the step comes to the container in two ways, or as to an argument: they may part later."""
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

    def absent(self) -> list[ReadSite]:
        """The entries of dicts that the step found missing."""
        return [journal._site(key) for journal in self.by_id.values() for key in journal.absent]

    def logged(self) -> list[Written]:
        """All writes, in order, but those to entries that the step reads."""
        return [each for each in self.written if not _is_of_entry(each)]

    def read(self) -> dict[int, Lines]:
        """The containers that were read, by id."""
        for journal in [*self.by_id.values()]:
            journal.check_entries()
        found = {key: journal.lines for key, journal in self.by_id.items() if journal.read_at}
        # An argument that the step reaches otherwise, too, may be another object in the next call.
        twice = [
            key for key, each in self.by_id.items() if each.arguments and len(each.arguments) + len(each.references) > 1
        ]
        return {key: self.by_id[key].lines for key in twice} | found

    def note_moved(self, value: Any, line: str) -> None:
        """Take a container for read that the step puts somewhere else at ``line``: what it held goes with it."""
        if isinstance(value, Recording):
            value._journal.read(line)

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
        except SystemExit:  # no program will print it
            for each in self.written if threading.get_ident() == thread else ():
                if each.journal is None:
                    before(*without_values(each.args), **each.kwargs)
            raise
        finally:
            builtins.print = before

    def recorded_logging(self) -> AbstractContextManager[None]:
        """Record what the user's code logs, for the length of the context."""
        return recorded_logging(lambda call, args, kwargs, frame: self._record_shown(call, "log", args, kwargs, frame))

    def _record_shown(
        self, call: LogCall | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> None:
        leaves, spec = tree_flatten((args, kwargs))  # lists and dicts as they are now
        args, kwargs = tree_unflatten([with_values(passed_on(leaf)) for leaf in leaves], spec)
        leaves = tree_flatten((args, kwargs))[0]
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
        self._entries: dict[int, Any] = {}  # that were there before, as they are now

    def _own(self, key: int, value: Any) -> None:
        self._entries[key] = value

    def _now(self, key: int) -> Any:
        return self._entries[key]

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
        if isinstance(key, int) and -own <= key < 0:
            return list.__getitem__(self, key)
        if self._is_before(key) and (key in self._entries or self._journal.read_entry(key)):
            return self._entries[key]
        self._journal.read()
        return list.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._is_before(key):
            self._journal.read()
            return list.__setitem__(self, key, value)
        self._journal.record("__setitem__", key, value)
        self._entries[key] = value

    def _is_before(self, key: Any) -> bool:
        """Whether an index is that of an entry that was there before the step."""
        shown = self._journal.read_at or self._journal.is_cleared
        return not shown and type(key) is int and 0 <= key < len(self._journal.live)


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

    def _own(self, key: Any, value: Any) -> None:
        dict.__setitem__(self, key, value)

    def _now(self, key: Any) -> Any:
        return dict.get(self, key)

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

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if self._look(key):
            return dict.__getitem__(self, key)
        log = self._journal.log_in(key, default) if not default else None
        if log is None:
            self[key] = default
            return default
        self._journal.absent.pop(key, None)  # each call makes the list if there is none
        self._journal.record("setdefault", key, default)
        return log

    def __getitem__(self, key: Any) -> Any:
        self._look(key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        return dict.get(self, key, default) if key in self else default

    def __contains__(self, key: object) -> bool:
        if starts_at(self._journal.live) is not MISSING:  # an entry that is read may be one that is not there
            self._journal.read()
        return self._look(key)

    def _look(self, key: Any) -> bool:
        """The step asks for an entry, of those that it wrote itself any; returns whether there is one."""
        journal = self._journal
        if not journal.has_unknown_keys and (dict.__contains__(self, key) or journal.read_entry(key)):
            return True
        if not journal.has_unknown_keys and not journal.read_at:
            if journal.read_absence(key):
                return False
            if isinstance(key, (str, int)) and journal.log_in(key, journal.live.get(key)) is not None:
                return True
        journal.read()
        return dict.__contains__(self, key)


class _DefaultDict(_Dict, defaultdict[Any, Any]):
    """A dict that records, and makes entries."""

    def __missing__(self, key: Any) -> Any:
        if self.default_factory is None:
            raise KeyError(key)
        return self.setdefault(key, self.default_factory())


class _Counter(_Dict, Counter[Any]):
    """A counter that records. What it lacks it counts as 0."""

    def __init__(self) -> None:
        dict.__init__(self)

    def __missing__(self, key: Any) -> int:
        return 0

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, number in Counter(*args, **kwargs).items():
            self[key] += number


_CLASSES: dict[type, type[Any]] = {
    list: _List,
    dict: _Dict,
    deque: _Deque,
    defaultdict: _DefaultDict,
    Counter: _Counter,
}
_KEPT = {
    *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__", "__dir__"),
    *("__getattribute__", "__setattr__", "__delattr__", "__hash__", "__doc__", "__dict__", "__weakref__"),
    *("__slots__", "__module__", "__orig_bases__", "__parameters__", "maxlen", "default_factory"),
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


for _base, _cls in _CLASSES.items():
    for _name in dir(_base):
        if getattr(_cls, _name) is getattr(_base, _name) and _name not in _KEPT:
            setattr(_cls, _name, _reading(_base, _name))
    register_pytree_node(_cls, _flatten, _unflatten)
_CLASSES[OrderedDict] = _Dict  # without what it has besides: a step that uses that is traced without a journal
