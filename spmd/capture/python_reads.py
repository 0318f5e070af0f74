"""Which plain Python state a step reads while it is traced: what its guards must look at.

The trace takes every Python value for a constant: ``self.tau``, ``args.alpha``, a global, a closure's variable, a list
of hooks. While the user's function runs, three things are watched: attribute reads of modules, optimizers and the
objects they lead to (their classes' ``__getattribute__``), global names of each function that starts (a trace function,
which hands on to the one that was there), and the cells of closures that are read. Of classes, modules and functions
those entries count whose names stand in code that ran (``namespaces.py``). Each read is noted as a place; what a place
holds when the program is ready is what it must hold at later calls.
"""

from __future__ import annotations

import argparse
import collections
import dis
import enum
import gc
import os
import sys
import sysconfig
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from operator import is_
from typing import Any

import torch
from torch import nn

import passes

from .._torch import BUFFERS, CHILDREN, HOOK_DICTS, MODULE_NOTES, PARAMETERS
from .namespaces import Namespaces
from .side_effects import holds_traced

_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = ("site-packages", "dist-packages")
_FOREIGN = {"torch", "spmd", "passes", "sympy", "mpmath", "numpy", "networkx"}  # torch traces with these
_OURS = tuple(os.path.dirname(os.path.abspath(each)) + os.sep for each in (os.path.dirname(__file__), passes.__file__))
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Held apart: state tensors and the tree of modules are guarded as a whole; `training` of every module always is.
_ELSEWHERE = {
    nn.Module: {
        *(PARAMETERS, BUFFERS, CHILDREN, "training"),
        *MODULE_NOTES,
    },
    torch.optim.Optimizer: {"state", "param_groups", "defaults", "step"},  # schedulers wrap step to count it
}
# Classes of Python's own whose objects hold what is the user's.
_SETTINGS = (
    *(argparse.Namespace, types.SimpleNamespace),
    *(collections.UserDict, collections.UserList, collections.ChainMap),
)
_PLAIN = (
    *(int, float, complex, str, bytes, type, enum.Enum, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_WRAPPED = {  # what wraps a function of the user's, and where it keeps it
    types.MethodType: ("__func__", "__self__"),
    partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    cached_property: ("func",),
}
_CACHED = type(lru_cache(len))
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
MISSING = object()


def _content_of_cell(cell: types.CellType, _: str, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return default


READERS: dict[str, Callable[..., Any]] = {  # of kinds of places, each called with (source, key, default)
    "item": dict.get,
    "entry": types.MappingProxyType.get,
    "attribute": getattr,
    "cell": _content_of_cell,
}


@dataclass(frozen=True)
class Place:
    """Where a value was read; ``name`` says it in the user's words."""

    kind: str  # "item" of a dict, "entry" of a class, "attribute" of an object, "cell"
    holder: Any
    key: str
    name: str
    kept: bool = False  # of a module or optimizer, whose changes ``side_effects.py`` tells

    @property
    def source(self) -> Any:
        """What ``READERS`` reads it from."""
        return vars(self.holder) if self.kind == "entry" else self.holder

    def get(self) -> Any:
        """What is there now; a value of its own if nothing is."""
        return READERS[self.kind](self.source, self.key, MISSING)

    def put(self, value: Any) -> None:
        """Put ``value`` there."""
        if self.kind == "cell":
            self.holder.cell_contents = value
        elif self.kind in ("attribute", "entry"):
            setattr(self.holder, self.key, value)
        elif value is MISSING:
            del self.holder[self.key]
        else:
            self.holder[self.key] = value


@dataclass(frozen=True)
class Container:
    """A list, dict or set that was reached, with its entries then."""

    name: str
    value: Any
    content: tuple[Any, ...] | None
    kept: bool


@dataclass(frozen=True)
class Fields:
    """The attributes that an object or a function of the user's had when the step came to it."""

    name: str
    holder: Any
    before: dict[str, Any]

    def changed(self) -> list[str]:
        """Which are others now, or new."""
        return [key for key, value in vars(self.holder).items() if value is not self.before.get(key, MISSING)]

    def put_back(self, key: str) -> None:
        """As it was."""
        if key in self.before:
            vars(self.holder)[key] = self.before[key]
        else:
            del vars(self.holder)[key]


@dataclass
class Reads:
    """The places that one trace read, each once, with what was there at the first read."""

    names: dict[int, str] = field(default_factory=dict)  # of modules and other arguments, by id
    places: dict[tuple[int, str], Place] = field(default_factory=dict)
    first: dict[tuple[int, str], Any] = field(default_factory=dict)
    containers: dict[int, Container] = field(default_factory=dict)
    fields: dict[int, Fields] = field(default_factory=dict)
    _seen: dict[int, Any] = field(default_factory=dict)  # what was looked into, kept alive so that ids stay unique
    _met: dict[int, dict[str, Any]] = field(default_factory=dict)  # attributes of ``fields``, by the id of __dict__
    _code: set[Any] = field(default_factory=set)
    _stack: ExitStack | None = None
    _thread: int = field(default_factory=threading.get_ident)  # others go on meanwhile, and read for themselves
    _patched: set[type] = field(default_factory=set)
    _before: Any = field(default_factory=sys.gettrace)  # the trace function of a debugger, or none

    def __post_init__(self) -> None:
        self._namespaces = Namespaces(self._note_entry)

    @contextmanager
    def watch(self, *roots: Any) -> Iterator[None]:
        """Note reads for the length of the context; ``roots`` are the function and the objects it is given."""
        with ExitStack() as stack:
            self._stack = stack
            for kind in _ELSEWHERE:
                self._patch(kind)
            for root in roots:
                self._look_into(root, self.names.get(id(root), type(root).__name__))
            self._before = sys.gettrace()
            stack.callback(sys.settrace, self._before)
            sys.settrace(self._tracer(self._before))
            try:
                yield
            except BaseException:
                self._changed(take_back=lambda now: True)
                raise
        self._stack = None
        self._tell(self._changed(take_back=holds_traced))

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """No function of the user's starts in here: a trace function slows down all Python code, half of it torch's."""
        now = sys.gettrace()
        sys.settrace(self._before)
        try:
            yield
        finally:
            sys.settrace(now)

    def _changed(self, take_back: Callable[[Any], bool]) -> list[str]:
        """What the step changed besides modules and optimizers; it is put back where ``take_back`` of it says so."""
        changed = []
        # Copies: comparing may itself read what is watched, and so note more.
        for place, value in zip([*self.places.values()], [*self.first.values()], strict=True):
            now = place.get()
            if not place.kept and now is not value:
                changed.append(place.name)
                if take_back(now):
                    place.put(value)
        for each in [*self.containers.values()]:
            if not each.kept and not same_content(each.value, each.content):
                changed.append(each.name)
                if take_back(each.value):
                    refill(each.value, each.content)
        for fields in [*self.fields.values()]:
            for key in fields.changed():
                changed.append(f"{fields.name}.{key}")
                if take_back(vars(fields.holder)[key]):
                    fields.put_back(key)
        return list(dict.fromkeys(changed))

    def _tell(self, changed: list[str]) -> None:
        if changed:
            warnings.warn(
                f"the step changes {', '.join(changed)}, which a compiled step does only once, while it is traced. "
                "Return the new value, or change it outside of the step",
                stacklevel=2,
            )

    # Looking at values

    def _note(self, kind: str, holder: Any, key: str, name: str, kept: bool = False) -> None:
        if (id(holder), key) in self.places or threading.get_ident() != self._thread:
            return
        place = self.places[id(holder), key] = Place(kind, holder, key, name, kept)
        value = place.get()  # may itself be a watched read: of a place that is known by now
        met = self._met.get(id(holder)) if kind == "item" else None
        # What the step itself wrote before it read there is not what it depends on.
        self.first[id(holder), key] = value if met is None else met.get(key, MISSING)
        self._look_into(value, name, kept)

    def _look_into(self, value: Any, name: str, kept: bool = False) -> None:
        """Follow a value to what the step may read through it."""
        if id(value) in self._seen or (is_plain(value) and not isinstance(value, type)):
            return
        self._seen[id(value)] = value
        if isinstance(value, CONTAINERS):
            self.containers[id(value)] = Container(name, value, content_of(value), kept)
            for key, item in items_of(value):
                if not is_plain(item):
                    self._look_into(item, f"{name}[{key!r}]")
        if isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, (type, types.ModuleType)):
            self._reach(value)
        elif isinstance(value, _CACHED):
            self._look_into_cache(value, name)
        elif isinstance(value, nn.Module):
            self._look_into_module(value, name)
        elif type(value) in _WRAPPED:
            for key in _WRAPPED[type(value)]:
                self._look_into(getattr(value, key), name)
        elif not isinstance(value, (torch.Tensor, torch.optim.Optimizer)):
            self.names.setdefault(id(value), name)
            self._watch_object(value, name)

    def _watch_object(self, value: Any, name: str) -> None:
        """Watch an object of the user's; what Python and torch keep for themselves is no setting."""
        kind = type(value)
        if _is_foreign_module(kind.__module__) and kind not in _SETTINGS:
            return
        self._reach(kind)
        self._keep(value, name)
        if not self._patch(kind):  # made in C: take it that all of it is read
            for key in getattr(value, "__dict__", ()):
                self._note("item", vars(value), key, f"{name}.{key}")

    def _look_into_module(self, module: nn.Module, name: str) -> None:
        """A module that is no argument: what is guarded as a whole of those that are, is read here."""
        if id(module) in self.names:
            return
        self.names[id(module)] = name
        for key in ("training", CHILDREN, PARAMETERS, BUFFERS):
            self._note("item", vars(module), key, f"{name}.{key}", kept=True)

    def _look_into_function(self, function: types.FunctionType) -> None:
        if hasattr(function, "__wrapped__"):
            self._look_into(function.__wrapped__, function.__qualname__)
        if _is_foreign(function.__code__.co_filename):
            return
        for key in ("__code__", "__defaults__", "__kwdefaults__"):  # reloading a file in a notebook replaces these
            self._note("attribute", function, key, f"{function.__qualname__}.{key}")
        self._namespaces.reach(function)
        self._keep(function, function.__qualname__)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note("cell", cell, "", f"the closure variable {variable} of {function.__qualname__}")

    def _look_into_cache(self, cached: Any, name: str) -> None:
        """A function with a cache: what it computes while traced must not stay in it."""
        assert self._stack is not None, "caches are looked into while tracing"
        self._stack.callback(_forget, cached, cached.cache_info().misses)
        self._look_into(cached.__wrapped__, name)

    # Classes, modules and functions

    def _keep(self, holder: Any, name: str) -> None:
        """Remember the attributes that the step might change."""
        if hasattr(holder, "__dict__"):
            self.fields[id(holder)] = Fields(name, holder, dict(vars(holder)))
            self._met[id(vars(holder))] = self.fields[id(holder)].before

    def _reach(self, holder: type | types.ModuleType) -> None:
        """Come to a class, with those it is made from, or to a module."""
        if isinstance(holder, types.ModuleType):
            if not _is_foreign_module(holder.__name__):
                self._namespaces.reach(holder)
            return
        for kind in holder.__mro__:
            if not _is_foreign_module(kind.__module__):
                self._namespaces.reach(kind)

    def _note_entry(self, holder: Any, key: str) -> None:
        if isinstance(holder, type):
            self._note("entry", holder, key, f"{holder.__qualname__}.{key}")
        else:
            self._note("item", vars(holder), key, f"{holder.__name__}.{key}")

    # Attributes

    def _patch(self, kind: type) -> bool:
        """Watch attribute reads on a class for as long as the context lasts; False where Python does not allow it."""
        assert self._stack is not None, "classes are watched while tracing"
        own = vars(kind).get("__getattribute__")
        if kind in self._patched or (own is None and any(base in self._patched for base in kind.__mro__)):
            return True
        try:
            kind.__getattribute__ = self._reader(kind.__getattribute__, _apart(kind))  # type: ignore[method-assign]
        except TypeError:
            return False
        self._patched.add(kind)
        if own is None:
            self._stack.callback(delattr, kind, "__getattribute__")
        else:
            self._stack.callback(setattr, kind, "__getattribute__", own)
        return True

    def _reader(self, original: Callable[..., Any], apart: set[str]) -> Callable[..., Any]:
        get_dict = object.__getattribute__
        places = self.places

        def __getattribute__(instance: Any, key: str) -> Any:
            value = original(instance, key)
            if key == "__dict__" and not apart:  # ``vars(settings)``: take it that all of it is read
                for name in value:
                    self._note("item", value, name, f"{self._name(instance)}.{name}")
            elif key not in apart and not key.startswith("__"):
                try:
                    fields = get_dict(instance, "__dict__")
                except AttributeError:
                    fields = None
                if fields is None or (id(fields), key) not in places:
                    self._note_attribute(instance, fields, key)
            return value

        return __getattribute__

    def _note_attribute(self, instance: Any, fields: dict[str, Any] | None, key: str) -> None:
        self._reach(type(instance))
        if fields is not None and key in fields:
            kept = isinstance(instance, tuple(_ELSEWHERE))
            if kept and key in HOOK_DICTS:  # torch never binds another dict there
                self._look_into(fields[key], f"{self._name(instance)}.{key}", kept)
                return
            self._note("item", fields, key, f"{self._name(instance)}.{key}", kept)
            return
        kind = next((kind for kind in type(instance).__mro__ if key in vars(kind)), None)
        if kind is None or (_is_foreign_module(kind.__module__) and key != "forward"):
            return
        value = vars(kind)[key]
        if isinstance(value, types.MemberDescriptorType):
            self._note("attribute", instance, key, f"{self._name(instance)}.{key}")
            return
        self._note("entry", kind, key, f"{kind.__qualname__}.{key}")
        if fields is not None and not hasattr(value, "__set__"):  # that the instance has none of its own
            self._note("item", fields, key, f"{self._name(instance)}.{key}", kept=True)

    def _name(self, instance: Any) -> str:
        return self.names.get(id(instance), type(instance).__name__)

    # Globals

    def _tracer(self, before: Any) -> Any:
        """A trace function that looks at each function once, when it first starts."""
        seen = self._code
        seen |= {
            each.__code__ for each in gc.callbacks if isinstance(each, types.FunctionType)
        }  # run whenever it suits

        def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
            if frame.f_code not in seen:
                seen.add(frame.f_code)
                self._look_at(frame.f_code, frame.f_globals)
            return before(frame, event, argument) if before is not None else None

        return trace

    def _look_at(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        if _is_foreign(code.co_filename):
            return
        self._namespaces.read_by(code)
        for name in names_in(code, "IMPORT_NAME"):
            self._look_into(sys.modules.get(name), name)
        where = os.path.basename(code.co_filename)
        written = names_in(code, "STORE_GLOBAL")
        for chain in (*global_chains(code), *((name,) for name in written)):
            self._look_along(chain, variables, where, chain[0] in written)

    def _look_along(self, chain: tuple[str, ...], holder: dict[str, Any], where: str, written: bool) -> None:
        """Note the global that a chain of names leads to, through modules."""
        for k, name in enumerate(chain):
            value = holder.get(name, MISSING)
            if not isinstance(value, types.ModuleType) or k == len(chain) - 1:
                if value is not MISSING or written:
                    self._note("item", holder, name, f"the global {name} of {where}")
                return
            if _is_foreign_module(value.__name__):
                return
            holder, where = vars(value), value.__name__


def names_in(code: types.CodeType, opname: str) -> set[str]:
    """The names that instructions of one kind have."""
    return {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == opname}


def global_chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Each global that ``code`` reads, with the attributes read off it: ``("settings", "TAU")``."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            if chain:
                yield tuple(chain)
            chain = [instruction.argval]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(instruction.argval)
        elif chain:
            yield tuple(chain)
            chain = []


def is_plain(value: Any) -> bool:
    """Whether a value is compared as it is: a number, a string, a dtype, a class, None."""
    return value is None or value is ... or isinstance(value, _PLAIN)


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """The entries of a container, by key or position."""
    return list(container.items()) if isinstance(container, dict) else list(enumerate(container))


def content_of(value: Any) -> tuple[Any, ...] | None:
    """The entries of a container that can change, to compare with later."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return tuple(value) if isinstance(value, (list, set, collections.deque)) else None


def same_content(value: Any, content: tuple[Any, ...] | None) -> bool:
    """Whether a container still holds the very same entries."""
    now = content_of(value)
    return content is None or (now is not None and len(now) == len(content) and all(map(is_, now, content)))


def _forget(cached: Any, misses: int) -> None:
    if cached.cache_info().misses != misses:
        cached.cache_clear()


def refill(container: Any, content: Any) -> None:
    """Give a container its entries back."""
    container.clear()
    if isinstance(container, dict):
        half = len(content) // 2
        container.update(zip(content[:half], content[half:], strict=True))
    else:
        (container.update if isinstance(container, set) else container.extend)(content)


def _apart(kind: type) -> set[str]:
    return next((names for base, names in _ELSEWHERE.items() if issubclass(kind, base)), set())


def _is_foreign(filename: str) -> bool:
    """Whether a file is Python's, torch's or ours: its globals are no settings of the user's."""
    if filename.startswith((_TORCH, *_OURS, "<")):
        return not filename.startswith(("<stdin", "<ipython"))
    for site in _SITE:
        if site in filename:
            return filename.partition(site)[2].split(os.sep)[1] in _FOREIGN
    return filename.startswith(_PYTHON)


def _is_foreign_module(name: str) -> bool:
    root = name.partition(".")[0]
    return root in _FOREIGN or root in sys.stdlib_module_names
