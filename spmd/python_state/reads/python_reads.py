"""``Reads``: the plain Python state that a step reads while it is traced, for guards to compare at later calls.

The trace takes every Python value for a constant: ``self.tau``, ``args.alpha``, a global, a closure's variable, a list
of hooks. While the user's function runs, three things are observed: attribute reads of modules, optimizers and the
objects they lead to (``attribute_reads.py``), the globals of each function that starts (``global_reads.py``), and the
cells of closures. Of classes, modules and functions those entries count whose names occur in code that ran
(``namespaces.py``). Each read is recorded as a ``ReadSite``; its value when the program is ready is what later calls
must find there.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import sys
import threading
import types
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from ..._torch import BUFFERS, CHILDREN, HOOK_DICTS, PARAMETERS, tree_flatten
from ...call.state import is_replaced
from ...interpreter.foreign_code import is_foreign_code, is_foreign_module, is_importing
from ..traced import holds_fakes, is_instance
from .attribute_reads import GUARDED_ELSEWHERE, AttributeReads
from .changes import Change
from .clocks import is_clock, refusing
from .compared_objects import ComparedObjects
from .global_reads import GlobalReads, globals_in, names_in
from .journals import Journals, Recording
from .namespaces import Namespaces
from .new_objects import NewObjects
from .read_sites import MISSING, KeyReference, ReadSite, Reference, is_plain
from .refusing import Refusals
from .snapshots import CONTAINERS, ContainerSnapshot, FieldsSnapshot, containers_in, content_of, items_of

# Python's own classes whose objects hold settings of the user's.
_SETTINGS = (
    *(argparse.Namespace, types.SimpleNamespace),
    *(collections.UserDict, collections.UserList, collections.ChainMap),
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
_CACHED = type(lru_cache(len))


@dataclass(eq=False)
class Reads:
    """The read sites of one trace, each once, with the value that it had before the step.

    After ``watch``, ``changes`` says what the step changed besides modules and optimizers, and ``changed_containers``
    whose entries.
    """

    names: dict[int, str] = field(default_factory=dict)  # of modules and other arguments, by id
    sites: dict[tuple[int, str], ReadSite] = field(default_factory=dict)
    first: dict[tuple[int, str], Any] = field(default_factory=dict)  # by site, the value before the step
    containers: dict[int, ContainerSnapshot] = field(default_factory=dict)
    fields: dict[int, FieldsSnapshot] = field(default_factory=dict)
    code: list[types.CodeType] = field(default_factory=list)  # the user's, that ran
    namespaces: list[dict[str, Any]] = field(default_factory=list)  # the globals of each of ``code``
    constants: set[int] = field(default_factory=set)  # ids of tensors at sites, which the program takes for constants
    changes: list[Change] = field(default_factory=list)
    changed_containers: list[tuple[ContainerSnapshot, str]] = field(default_factory=list)  # with the key of the site
    stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)  # fakes, by the id of live state
    references: list[Reference] = field(default_factory=list)  # to state, that the step read
    journals: Journals = field(default_factory=Journals)  # of containers that the step writes to and does not read
    held: set[int] = field(default_factory=set)  # ids of containers that lie at no site
    refused: list[str] = field(default_factory=list)  # names of what refers to state and cannot have fakes in it
    refusals: Refusals = field(default_factory=Refusals)  # in the place of iterators, files and queues
    fixed: set[tuple[int, str]] = field(default_factory=set)  # sites whose numbers cannot be inputs
    layouts_read: set[bool] = field(default_factory=set)  # of the tensors whose strides the step asks for, ``is_index``
    notes: set[Any] = field(default_factory=set)  # keys of sites and containers that overrides alone have read
    _compared: ComparedObjects = field(default_factory=ComparedObjects)
    _at_read: dict[tuple[int, str], Any] = field(default_factory=dict)  # by site, the value at the first read
    _seen: dict[int, Any] = field(default_factory=dict)  # values followed, kept alive so that ids stay unique
    _before: dict[int, dict[str, Any]] = field(default_factory=dict)  # attributes of ``fields``, by the id of __dict__
    _new: NewObjects = field(default_factory=NewObjects)  # what the step makes itself is no state
    _stack: ExitStack | None = None
    _thread: int = field(default_factory=threading.get_ident)  # others run meanwhile, and their reads do not count

    def __post_init__(self) -> None:
        self._namespaces = Namespaces(self._note_entry)
        self._attributes = AttributeReads(self.sites, self._note_attribute, self._note_missing)
        self._globals = GlobalReads(self._note_globals)
        self.journals.shown = self._follow_shown

    @contextmanager
    def watch(self, *roots: Any, held: Iterable[tuple[str, Any]] = ()) -> Iterator[None]:
        """Record reads for the length of the context; ``roots`` are the function and its arguments.

        ``held``: what the step can read though nothing observes what holds it, by name. What the step changed is undone
        at the end, also if it raised. Raises ``CaptureError`` if the step took values that each call would get again,
        or wrote where no call would write again.
        """
        with ExitStack() as stack:
            self._stack = stack
            stack.enter_context(self._new.watch())
            stack.enter_context(self._attributes)
            for cls in GUARDED_ELSEWHERE:
                self._attributes.watch(cls)
            for root in roots:
                self._follow(root, self.names.get(id(root), type(root).__name__))
            self._follow_held(held)
            stack.enter_context(self._globals.watch())
            try:
                yield
            except BaseException:
                self._undo()
                raise
        self._stack = None
        self._undo()
        self.refusals.check()
        self._compared.check(self.code)

    def sites_of(self, tensor: torch.Tensor) -> list[ReadSite]:
        """The sites that the step read and that hold a tensor, or a container with it."""
        sites = [*self.sites.values()]
        return [site for site in sites if any(leaf is tensor for leaf in tree_flatten(site.get())[0])]

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a site that holds a tensor, or a container with it; nothing if the step read none."""
        for site in self.sites_of(tensor):
            return site.name
        containers = [*self.containers.values()]
        return next((each.name for each in containers if any(item is tensor for item in each.content or ())), "")

    def was_read(self, site: ReadSite, before: Any) -> bool:
        """Whether the step may have read the value ``before``: not if it had written another when it first read."""
        return self._at_read.get(site.address, self) is before

    def leave_out(self, addresses: Container[tuple[int, str]]) -> None:
        """Forget sites that the program takes as inputs, or that were written before they were read."""
        written = [self.sites.pop(address) for address in [*self.sites] if address in addresses]
        apart = {id(container) for site in written for container in containers_in(site.get())}
        self.containers = {
            k: each for k, each in self.containers.items() if k not in apart and not holds_fakes(each.content)
        }

    def names_in_code(self) -> set[str]:
        """Names of attributes and of all else in the user's code that ran, and its texts, which may be such names."""
        texts = [each for code in self.code for each in code.co_consts if isinstance(each, str)]
        return {*texts, *(name for code in self.code for name in code.co_names)}

    def is_made(self, value: Any) -> bool:
        """Whether the step itself made an object while it was traced."""
        return value in self._new

    def forget_notes(self) -> None:
        """Forget what overrides alone have read and has changed since: they keep notes."""
        for note in self.notes:
            if note in self.sites and self.sites[note].get() is not self.first.get(note, self):
                del self.sites[note]
            elif note in self.containers and self.containers[note].changed():
                del self.containers[note]

    def unwatched(self) -> AbstractContextManager[None]:
        """Do not look for functions that start: none of the user's does in here."""
        return self._globals.paused()

    def _undo(self) -> None:
        """Note what the step changed besides modules and optimizers, and undo it."""
        self._compared.restore()
        changes: dict[tuple[int, str], Change] = {}
        known = [*self.sites.items()]  # a copy: comparing may itself read what is watched
        for address, site in known:
            if address not in self.first:  # an interrupt came while it was recorded
                continue
            now, before = site.get(), self.first[address]
            if not site.owned and now is not before:
                changes[address] = self._change(site, before, now)
        for fields in [*self.fields.values()]:
            for key in fields.changed():
                site = ReadSite("item", vars(fields.holder), key, f"{fields.name}.{key}")
                before = fields.before.get(key, MISSING)
                changes.setdefault(site.address, self._change(site, before, site.get()))
        changed = [each for each in self.containers.values() if not each.owned and each.changed()]
        holders = {id(site.get()): site.key for site in [*self.sites.values()]}
        self.changed_containers = [(each, holders.get(id(each.value), "")) for each in changed]
        self.changes = list(changes.values())
        for change in self.changes:
            change.site.put(change.before)
        for container in changed:
            container.restore()

    def _change(self, site: ReadSite, before: Any, now: Any) -> Change:
        return Change(site, before, now, self.was_read(site, before), tree_flatten(before)[0])

    # Record sites

    def _note(self, kind: str, holder: Any, key: str, name: str, owned: bool = False) -> None:
        if (id(holder), key) in self.sites or threading.get_ident() != self._thread:
            return
        site = self.sites[id(holder), key] = ReadSite(kind, holder, key, name, owned)
        value = site.get()  # may itself be a watched read, of a site that is recorded by now
        before = self._before.get(id(holder)) if kind == "item" else None
        self._at_read[id(holder), key] = value
        # What the step itself wrote before it read there is not what it depends on.
        self.first[id(holder), key] = value if before is None else before.get(key, MISSING)
        self._stand_in(Reference(name, site), value)
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
        self.code.append(code)
        self.namespaces.append(variables)
        self._namespaces.read_by(code)
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
            assert self._stack is not None, "code starts while it is traced"
            variables["isinstance"] = is_instance
            self._stack.callback(variables.pop, "isinstance", None)

    def _note_attribute(self, instance: Any, fields: dict[str, Any] | None, key: str) -> None:
        """Record an attribute where it lives: in ``fields``, the instance's dict, or in a class."""
        self._reach(type(instance))
        name = f"{self._name(instance)}.{key}"
        if key == "__dict__":
            if fields is not None and instance not in self._new:
                self._note("names", fields, "", f"which attributes {self._name(instance)} has", owned=True)
            return
        if fields is not None and key in fields and instance in self._new:
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
            if instance not in self._new:
                self._note("attribute", instance, key, name)
            return
        self._note_entries(instance, key)
        has_fields = fields is not None and instance not in self._new
        if has_fields and not hasattr(value, "__set__"):  # that the instance has none of its own
            self._note("item", fields, key, name, owned=True)

    def _note_missing(self, instance: Any, fields: dict[str, Any], key: str) -> None:
        """Record that an instance has no attribute ``key``, as ``hasattr`` may ask."""
        is_users = not is_foreign_module(type(instance).__module__) or isinstance(instance, nn.Module)
        if is_users and instance not in self._new:
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
        return self.names.get(id(instance), type(instance).__name__)

    # Follow values to what the step may read through them

    def _follow_held(self, held: Iterable[tuple[str, Any]]) -> None:
        """Follow values that lie at no site: no journal can take the place of a container there."""
        before = set(self.containers)
        for name, value in held:
            self._follow(value, name)
        self.held = self.containers.keys() - before

    def _follow_shown(self, container: Any) -> None:
        """Follow what a container with a journal holds: the step sees that after all, and may change it."""
        for key, item in items_of(container):
            name = f"{self._name(container)}[{key!r}]"
            if id(item) in self.journals.by_id:
                self.containers.setdefault(id(item), ContainerSnapshot(name, item, content_of(item), False))
                self._follow_shown(item)
            elif not is_plain(item):
                self._follow(item, name)

    def _follow(self, value: Any, name: str, owned: bool = False, key: str = "") -> None:
        if id(value) in self._seen or (is_plain(value) and not isinstance(value, type)):
            return
        if id(value) in self.journals.by_id or isinstance(value, Recording):
            return  # the step sees nothing of what it holds
        if value is vars(builtins):  # in a dict in which code was run by ``exec``; to restore it would end Python
            return
        self._seen[id(value)] = value
        name = self.names.get(id(value), name)
        if isinstance(value, CONTAINERS):
            if value not in self._new:
                self.containers[id(value)] = ContainerSnapshot(name, value, content_of(value), owned)
                for index, item in items_of(value):
                    self._stand_in(Reference(name, value, index), item)
                for each in [*value] if isinstance(value, dict) else []:
                    if isinstance(each, torch.Tensor):
                        self._stand_in(KeyReference(f"{name}, by parameter", value, [each]), each)
            for index, item in items_of(value):
                if not is_plain(item):
                    self._follow(item, f"{name}[{index!r}]", owned, key)
        if isinstance(value, types.FunctionType):
            self._follow_function(value)
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
            self.names.setdefault(id(value), name)
            self._follow_object(value, name, key)

    def _follow_object(self, value: Any, name: str, key: str) -> None:
        """Watch an object of the user's; those of Python's and torch's own classes are no settings."""
        cls = type(value)
        for each in [*value] if isinstance(value, weakref.WeakKeyDictionary) else []:
            self._stand_in(Reference(name, value), each)
        if value not in self._new:
            self._compared.note(value, name, key)
        if is_foreign_module(cls.__module__) and cls not in _SETTINGS:
            return
        self._reach(cls)
        if value not in self._new:
            self._note("attribute", value, "__class__", f"the class of {name}")
            self._take_fields(value, name)
        if not self._attributes.watch(cls):
            for field_name in getattr(value, "__dict__", ()):
                self._note("item", vars(value), field_name, f"{name}.{field_name}")

    def _follow_module(self, module: nn.Module, name: str) -> None:
        """Record of a module that is no argument what is guarded as a whole of those that are."""
        self._reach(type(module))
        if id(module) in self.names:
            return
        self.names[id(module)] = name
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
        assert self._stack is not None, "caches are followed while tracing"
        self._stack.callback(_forget, function, function.cache_info().misses)
        self._follow(function.__wrapped__, name)

    def _stand_in(self, reference: Reference, value: Any) -> None:
        """Put a fake in the place of state that something else than its module or optimizer holds.

        And what records in the place of a container that has a journal, and what refuses in that of a clock, or of an
        iterator, file or queue that the step has not made.
        """
        if is_clock(value):
            self._replace(reference, value, refusing(value))
        refusal = self.refusals.stand_in(value, reference.name)
        if refusal is not None and not self._is_made(reference, value):
            if isinstance(reference.holder, (tuple, set, frozenset)):
                self.refusals.in_vain.append(reference.name)
            else:
                self._replace(reference, value, refusal)
        journal = self.journals.by_id.get(id(value))
        if journal is not None:
            self._replace(reference, value, journal.stand_in)
            journal.references.append(reference)
        if not isinstance(value, torch.Tensor):
            return
        fake = self.stand_ins.get(id(value))
        if is_replaced(value) or (fake is not None and not isinstance(reference.holder, (ReadSite, list, dict))):
            self.refused.append(reference.name)
        elif fake is not None:
            self._replace(reference, value, fake)
            self.references.append(reference)

    def _is_made(self, reference: Reference, value: Any) -> bool:
        """Whether the step itself has made a value, or put it where it is found."""
        site = reference.holder
        return value in self._new or (isinstance(site, ReadSite) and self.first.get(site.address) is not value)

    def _replace(self, reference: Reference, value: Any, stand_in: Any) -> None:
        assert self._stack is not None, "state is read while tracing"
        reference.put(stand_in)
        self._stack.callback(self._restore, reference, value, stand_in)

    @staticmethod
    def _restore(reference: Reference, value: Any, stand_in: Any) -> None:
        if reference.get() is stand_in:
            reference.put(value)

    def _take_fields(self, holder: Any, name: str) -> None:
        """Take a snapshot of the attributes that the step might change."""
        if hasattr(holder, "__dict__"):
            self.fields[id(holder)] = FieldsSnapshot(name, holder, dict(vars(holder)))
            self._before[id(vars(holder))] = self.fields[id(holder)].before

    def _reach(self, holder: type | types.ModuleType) -> None:
        """Come to a class, with its bases, or to a module."""
        if isinstance(holder, types.ModuleType):
            if not is_foreign_module(holder.__name__):
                self._namespaces.reach(holder)
            return
        for cls in holder.__mro__:
            if not is_foreign_module(cls.__module__):
                self._namespaces.reach(cls)


def _forget(function: Any, misses: int) -> None:
    """Clear the cache of a function if it has grown since it had ``misses``."""
    if function.cache_info().misses != misses:
        function.cache_clear()
