"""``Watching``: while the user's function runs, each read is noted, and what it leads to is followed."""

from __future__ import annotations

import argparse
import builtins
import collections
import configparser
import os
import string
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from ..._torch import BUFFERS, CHILDREN, HOOK_DICTS, PARAMETERS
from ...interpreter.foreign_code import is_foreign_code, is_foreign_module, is_importing
from ..traced import is_instance
from .attribute_reads import GUARDED_ELSEWHERE, AttributeReads
from .contents import Contents, objects_in, results_of, tensors_of_cache
from .global_reads import GlobalReads, globals_in, names_in
from .journals import Recording
from .namespaces import Namespaces
from .read_sites import MISSING, KeyReference, ReadSite, Reference, is_plain
from .recorded_reads import RecordedReads
from .snapshots import CONTAINERS, ContainerSnapshot, FieldsSnapshot, content_of, items_of
from .stand_ins import StandIns

# Python's own classes whose objects hold settings of the user's.
_SETTINGS = (
    *(argparse.Namespace, types.SimpleNamespace),
    *(collections.UserDict, collections.UserList, collections.ChainMap),
    *(collections.UserString, string.Template),
    *(configparser.RawConfigParser, configparser.SectionProxy),
    torch.optim.lr_scheduler.LRScheduler,
    BlockMask,  # of flex_attention
)
_WRAPPERS = {  # of the user's functions, each with the attributes that hold what it wraps
    types.MethodType: ("__func__", "__self__"),
    types.BuiltinMethodType: ("__self__",),  # such as ``generator.random``
    partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    cached_property: ("func",),
}
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_ENVIRONMENT = frozenset(("environ", "getenv", "environb", "getenvb"))  # how code in Python reads it
_CACHED = type(lru_cache(len))


class Watching:
    """Notes sites, and follows values to what may be read through them, for ``reads``."""

    def __init__(self, reads: RecordedReads) -> None:
        self._reads = reads
        self._seen: dict[int, Any] = {}  # values followed, kept alive so that ids stay unique
        self._before: dict[int, dict[str, Any]] = {}  # attributes of ``fields``, by the id of __dict__
        self._thread = threading.get_ident()  # others run meanwhile, and their reads do not count
        self._namespaces = Namespaces(self._note_entry)
        self._attributes = AttributeReads(reads.sites, self._note_attribute, self._note_missing)
        self.globals = GlobalReads(self._note_globals)
        reads.journals.shown = self._follow_shown

    @contextmanager
    def watch(self, roots: Iterable[Any], held: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Watch what is read from ``roots`` and ``held``, as ``Reads.watch`` has them."""
        with ExitStack() as stack:
            self._stack, self._stand_ins = stack, StandIns(self._reads, stack)
            stack.enter_context(self._reads.new.watch())
            stack.enter_context(self._attributes)
            for cls in GUARDED_ELSEWHERE:
                self._attributes.watch(cls)
            for root in roots:
                self._follow(root, self._reads.names.get(id(root), type(root).__name__))
            self._follow_held(held)
            stack.enter_context(self.globals.watch())
            yield

    # Note sites

    def _note(self, kind: str, holder: Any, key: str, name: str, owned: bool = False) -> None:
        if (id(holder), key) in self._reads.sites or threading.get_ident() != self._thread:
            return
        site = self._reads.sites[id(holder), key] = ReadSite(kind, holder, key, name, owned)
        value = site.get()  # may itself be a watched read, of a site that is recorded by now
        before = self._before.get(id(holder)) if kind == "item" else None
        self._reads.at_read[id(holder), key] = value
        # What the step itself wrote before it read there is not what it depends on.
        self._reads.first[id(holder), key] = value if before is None else before.get(key, MISSING)
        if before is not None and value is not before.get(key, MISSING):
            self._reads.new.note_put(value)
        self._stand_ins.put(Reference(name, site), value)
        self._follow(value, name, owned, key)

    def _note_entry(self, holder: Any, key: str) -> None:
        """Record an entry of a class, a module or a function."""
        if isinstance(holder, type):
            self._note("entry", holder, key, f"{holder.__qualname__}.{key}")
        else:
            self._note("item", vars(holder), key, f"{holder.__name__}.{key}")

    def _note_globals(self, frame: types.FrameType) -> bool:
        """Record the globals of code that starts, and follow what it imports; whether that is done for good.

        What runs for an import (hooks of the import system, and modules) is no part of the step.
        """
        code, variables = frame.f_code, frame.f_globals
        if is_foreign_code(code, variables):
            return True
        if is_importing(frame):
            return False
        self._reads.code.append(code)
        self._reads.namespaces.append(variables)
        self._namespaces.read_by(code)
        if not _ENVIRONMENT.isdisjoint(code.co_names):
            self._follow(os.environ, "os.environ")
        for name in names_in(code, "IMPORT_NAME"):
            self._follow(sys.modules.get(name), name)
        for holder, key, where in globals_in(code, variables):
            if holder.get(key) is not is_instance:
                self._note("item", holder, key, f"the global {key} of {where}")
        self._answer_isinstance(code, variables)
        return True

    def _answer_isinstance(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        """Let the user's code see numbers of Python's where it asks: only its own, since torch asks for symbols."""
        if "isinstance" in code.co_names and "isinstance" not in variables:
            variables["isinstance"] = is_instance
            self._stack.callback(variables.pop, "isinstance", None)

    def _note_attribute(self, instance: Any, fields: dict[str, Any] | None, key: str) -> None:
        """Record an attribute where it lives: in ``fields``, the instance's dict, or in a class."""
        self._reach(type(instance))
        name = f"{self._name(instance)}.{key}"
        if key == "__dict__":
            if fields is not None and instance not in self._reads.new:
                self._note("names", fields, "", f"which attributes {self._name(instance)} has", owned=True)
            return
        if fields is not None and key in fields and instance in self._reads.new:
            is_hooks = isinstance(instance, nn.Module) and key in HOOK_DICTS  # a dict that is as new
            for each in fields[key].values() if is_hooks else [fields[key]]:
                self._follow(each, name)
            return
        if fields is not None and key in fields:
            owned = isinstance(instance, tuple(GUARDED_ELSEWHERE))
            if owned and key in HOOK_DICTS:  # torch never binds another dict there
                self._follow(fields[key], name, owned)
            else:
                self._note("item", fields, key, name, owned)
            return
        cls = next((cls for cls in type(instance).__mro__ if key in vars(cls)), None)
        if cls is None or (is_foreign_module(cls.__module__) and key != "forward"):
            return
        value = vars(cls)[key]
        if isinstance(value, types.MemberDescriptorType):
            if instance not in self._reads.new:
                self._note("attribute", instance, key, name)
            return
        self._note_entries(instance, key)
        has_fields = fields is not None and instance not in self._reads.new
        if has_fields and not hasattr(value, "__set__"):  # that the instance has none of its own
            self._note("item", fields, key, name, owned=True)

    def _note_missing(self, instance: Any, fields: dict[str, Any], key: str) -> None:
        """Record that an instance has no attribute ``key``, as ``hasattr`` may ask."""
        cls = type(instance)
        is_users = not is_foreign_module(cls.__module__) or isinstance(instance, (*_SETTINGS, nn.Module))
        if is_users and instance not in self._reads.new:
            owned = isinstance(instance, tuple(GUARDED_ELSEWHERE))
            self._note("item", fields, key, f"{self._name(instance)}.{key}", owned)
            self._note_entries(instance, key)

    def _note_entries(self, instance: Any, key: str) -> None:
        """Record an entry of an instance's class, there or not, and of its bases up to the first that has it."""
        for cls in type(instance).__mro__:
            if not is_foreign_module(cls.__module__):
                self._note("entry", cls, key, f"{cls.__qualname__}.{key}")
            if key in vars(cls):
                return

    def _name(self, instance: Any) -> str:
        return self._reads.names.get(id(instance), type(instance).__name__)

    # Follow values to what the step may read through them

    def _follow_held(self, held: Iterable[tuple[str, Any]]) -> None:
        """Follow values that lie at no site: no journal can take the place of a container there."""
        before = set(self._reads.containers)
        for name, value in held:
            self._follow(value, name)
        self._reads.held |= self._reads.containers.keys() - before

    def _follow_shown(self, container: Any) -> None:
        """Follow what a container with a journal holds: the step sees that after all, and may change it."""
        for key, item in items_of(container):
            name = f"{self._name(container)}[{key!r}]"
            if id(item) in self._reads.journals.by_id:
                self._reads.containers.setdefault(id(item), ContainerSnapshot(name, item, content_of(item), False))
                self._follow_shown(item)
            elif not is_plain(item):
                self._follow(item, name)

    def _follow(self, value: Any, name: str, owned: bool = False, key: str = "") -> None:
        if id(value) in self._seen or (is_plain(value) and not isinstance(value, type)):
            return
        if id(value) in self._reads.journals.by_id or isinstance(value, Recording):
            return  # the step sees nothing of what it holds
        if value is vars(builtins):  # in a dict in which code was run by ``exec``; to restore it would end Python
            return
        self._seen[id(value)] = value
        name = self._reads.names.get(id(value), name)
        if isinstance(value, CONTAINERS):
            if value not in self._reads.new:
                self._reads.containers[id(value)] = ContainerSnapshot(name, value, content_of(value), owned)
                for index, item in items_of(value):
                    self._stand_ins.put(Reference(name, value, index), item)
                for each in [*value] if isinstance(value, dict) else []:
                    if isinstance(each, torch.Tensor):
                        self._stand_ins.put(KeyReference(f"{name}, by parameter", value, [each]), each)
                    elif not is_plain(each) and not isinstance(each, types.FunctionType):
                        self._follow(each, f"a key of {name}")
            for index, item in items_of(value):
                if not is_plain(item):
                    self._follow(item, f"{name}[{index!r}]", owned, key)
        if isinstance(value, types.FunctionType):
            self._follow_function(value)
        elif isinstance(value, threading.local):
            self._reach(type(value))
            self._take_fields(value, name)
            self._note_fields(value, name)
        elif isinstance(value, weakref.ref):
            self._follow(value(), name)
        elif isinstance(value, (type, types.ModuleType)):
            self._reach(value)
        elif isinstance(value, _CACHED):
            self._follow_cached(value, name)
        elif isinstance(value, nn.Module):
            self._follow_module(value, name)
        elif type(value) in _WRAPPERS:
            for part in _WRAPPERS[type(value)]:
                self._follow(getattr(value, part), name, key=key)
        elif not isinstance(value, (torch.Tensor, torch.optim.Optimizer)):
            self._reads.names.setdefault(id(value), name)
            self._follow_object(value, name, key)

    def _follow_object(self, value: Any, name: str, key: str) -> None:
        """Watch an object of the user's; those of Python's and torch's own classes are no settings."""
        cls = type(value)
        for each in [*value] if isinstance(value, weakref.WeakKeyDictionary) else []:
            self._stand_ins.put(Reference(name, value), each)
        if isinstance(value, _WEAK):
            entries = vars(value)["data"]
            self._reads.held.add(id(entries))
            self._follow(entries, name)
            for each in [] if isinstance(value, weakref.WeakValueDictionary) else [*value]:
                self._follow(each, f"a key of {name}")
        if value not in self._reads.new:
            self._reads.compared.note(value, name, key)
            contents = Contents.of(value, name)
            self._reads.contents += [] if contents is None else [contents]
            for k, each in enumerate(objects_in(value)):
                self._follow(each, f"{name}[{k}]")
        if is_foreign_module(cls.__module__) and not isinstance(value, _SETTINGS):
            return
        self._reach(cls)
        if value not in self._reads.new:
            self._note("attribute", value, "__class__", f"the class of {name}")
            self._take_fields(value, name)
        if not self._attributes.watch(cls):
            self._note_fields(value, name)

    def _note_fields(self, value: Any, name: str) -> None:
        """Note all attributes of an object that cannot be watched."""
        for field_name in getattr(value, "__dict__", ()):
            self._note("item", vars(value), field_name, f"{name}.{field_name}")
        if hasattr(value, "__dict__") and value not in self._reads.new:  # ``hasattr`` asks for others
            self._note("names", vars(value), "", f"which attributes {name} has", owned=True)

    def _follow_module(self, module: nn.Module, name: str) -> None:
        """Record of a module that is no argument what is guarded as a whole of those that are."""
        self._reach(type(module))
        if id(module) in self._reads.names:
            return
        self._reads.names[id(module)] = name
        for key in ("training", CHILDREN, PARAMETERS, BUFFERS):
            self._note("item", vars(module), key, f"{name}.{key}", owned=True)

    def _follow_function(self, function: types.FunctionType) -> None:
        if hasattr(function, "__wrapped__"):
            self._follow(function.__wrapped__, function.__qualname__)
        if is_foreign_code(function.__code__, function.__globals__):
            return
        for key in ("__code__", "__defaults__", "__kwdefaults__"):  # reloading a file in a notebook replaces these
            self._note("attribute", function, key, f"{function.__qualname__}.{key}")
        self._namespaces.reach(function)
        self._take_fields(function, function.__qualname__)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._note("cell", cell, variable, f"the closure variable {variable} of {function.__qualname__}")

    def _follow_cached(self, function: Any, name: str) -> None:
        """A function with a cache: what it computes while traced must not stay in the cache."""
        results = results_of(function)
        self._stack.callback(self._forget, function, name, function.cache_info().misses, bool(results))
        self._follow(function.__wrapped__, name)
        for each in results:
            self._follow(each, f"a result of {name}")
        name = getattr(function, "__qualname__", name)
        self._reads.cached |= {id(each): (f"a result of {name}", each, function) for each in tensors_of_cache(function)}

    def _forget(self, function: Any, name: str, misses: int, is_compared: bool) -> None:
        """Clear the cache of a function if it has grown since it had ``misses``; note results that can change."""
        is_compared = is_compared or bool(results_of(function))
        if function.cache_info().misses != misses:
            function.cache_clear()
        if is_compared:
            self._reads.contents.append(Contents.of_results(function, f"the cache of {name}"))

    def _take_fields(self, holder: Any, name: str) -> None:
        """Take a snapshot of the attributes that the step might change."""
        if hasattr(holder, "__dict__"):
            self._reads.fields[id(holder)] = FieldsSnapshot(name, holder, dict(vars(holder)))
            self._before[id(vars(holder))] = self._reads.fields[id(holder)].before

    def _reach(self, holder: type | types.ModuleType) -> None:
        """Come to a class, with its bases, or to a module."""
        if isinstance(holder, types.ModuleType):
            if not is_foreign_module(holder.__name__):
                self._namespaces.reach(holder)
            return
        for cls in holder.__mro__:
            if not is_foreign_module(cls.__module__):
                self._namespaces.reach(cls)
