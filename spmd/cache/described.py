"""Descriptions of values that are equal in two processes if a trace cannot tell the values apart.

Plain values, and containers of them, are described as they are; functions by code, defaults and closures; classes by
all that they define; tensors by their contents. Of an object of the user's the class counts alone: what the step reads
of it is recorded, attribute by attribute. All else makes a call one that is not cached.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import dataclasses
import enum
import hashlib
import json
import logging
import re
import sys
import types
import typing
from abc import ABC
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch import OpOverload, OpOverloadPacket, has_registered_classes
from ..interpreter.foreign_code import is_foreign_code, is_foreign_file, is_foreign_module
from ..python_state.reads import CONTAINERS, MISSING
from .code_digests import code_digest
from .library_code import is_of_library
from .not_cached import NotCachedError

PURE = frozenset(
    "__future__ abc builtins cmath collections contextlib copy copyreg dataclasses enum fractions functools itertools "
    "keyword logging math numbers operator re reprlib statistics string textwrap types typing typing_extensions "
    "warnings weakref _collections _collections_abc _functools _operator _warnings _weakref _abc".split()
)
"""Modules of Python whose functions depend on their arguments alone."""

# Modules and functions of torch that say something of the process, or read files.
_OF_TORCH = frozenset(
    "load from_file hub cuda backends distributed get_num_threads get_num_interop_threads initial_seed get_rng_state "
    "default_generator seed cpu accelerator mps xpu utils multiprocessing".split()
)
# The same functions, by whatever module of torch they are found.
_READING = frozenset("load from_file get_num_threads get_num_interop_threads initial_seed get_rng_state seed".split())
_ALLOWED = {
    ("utils", "checkpoint"),
    ("utils", "_contextlib"),
    ("cuda", "amp"),
    ("cuda", "is_available"),  # of which the surroundings know
    ("cuda", "is_current_stream_capturing"),
    ("cuda", "Stream"),
    ("cuda", "streams"),
    ("cpu", "amp"),
    ("distributed", "tensor"),
}
_PACKAGES = {"torch", "spmd", "passes", "sympy", "mpmath"}  # whose versions and files the surroundings have
UNSAFE = frozenset("open input eval exec compile __import__ globals locals vars dir breakpoint id hash".split())
"""Builtins that read what is not watched, or give something else in another process."""
_UNSAFE = frozenset(getattr(builtins, name) for name in (*UNSAFE, "getattr", "hasattr"))  # these two unless called
_WHOLE = (str, int, float, complex, bytes, bool, type(None), type(...), type(NotImplemented))
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_GENERATED = ("<string>", "<frozen ", "<eval_with_key>")  # by Python, and by torch, from what is compared besides
_CACHED = type(lru_cache(len))
# Python's own classes that a class of the user's may extend: what their objects hold is described, or is recorded.
_BASES = (
    *(object, ABC, typing.Generic, typing.Protocol, enum.Enum, nn.Module, Optimizer, *CONTAINERS, *_WHOLE[:6]),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter),
    *(argparse.Namespace, types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap),
    *(torch.autograd.Function,),
)
_ALL_BASES = {base for each in _BASES for base in each.__mro__}
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType, type(vars(namedtuple("_T", "x"))["x"]))
_NOT_OF_CODE = {
    "__doc__",
    "__dict__",
    "__weakref__",
    "__module__",
    "__annotations__",
    "__annotate__",
    "__abstractmethods__",
    "__slotnames__",  # which the first copy of an object leaves there
}
CALLABLES = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    cached_property: ("func",),
    partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
    _CACHED: ("__wrapped__",),
}


def digest_of(description: Any) -> str:
    """A hash of a description."""
    return hashlib.sha256(json.dumps(description, separators=(",", ":")).encode()).hexdigest()[:32]


@dataclass
class Describer:
    """Describes values as JSON. ``names``: of state, modules and optimizers of the call, by id, which stand for them.

    ``ran``: the ids of code objects that a trace ran, of whose functions all must be known; ``cells``: those of cells
    that it followed.
    """

    names: Mapping[int, str]
    ran: Collection[int] = ()
    cells: Collection[int] = ()
    codes: dict[int, types.CodeType] = field(default_factory=dict)  # of all functions that were described, by id
    _classes: dict[int, tuple[type, list[str]]] = field(default_factory=dict)
    _functions: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict)

    def of(self, value: Any, within: tuple[int, ...] = ()) -> Any:
        """The description of ``value``. Raises ``NotCachedError`` where another process cannot compare it."""
        if value is MISSING:
            return ["missing"]
        if id(value) in self.names:
            return ["named", self.names[id(value)]]
        if type(value) in _WHOLE:
            return [type(value).__name__, value.hex() if type(value) is float else repr(value)]
        if id(value) in within:
            return ["again", len(within) - within.index(id(value))]
        within = (*within, id(value))
        if isinstance(value, type) and not isinstance(value, types.GenericAlias):
            return self.of_class(value)
        if isinstance(value, types.FunctionType):
            return self.of_function(value)
        if type(value) is _CACHED and value.cache_info().currsize and not is_of_library(value.__module__):
            raise NotCachedError(f"{value.__qualname__} has cached values")
        if type(value) in CALLABLES:
            parts = [self.of(getattr(value, key), within) for key in CALLABLES[type(value)]]
            return [type(value).__name__, *parts]
        return self._of_object(value, within)

    def _of_object(self, value: Any, within: tuple[int, ...]) -> Any:
        if isinstance(value, enum.Enum):
            return ["enum", self.of_class(type(value)), value.name, self.of(value.value, within)]
        if isinstance(value, (*_TORCH, OpOverload, OpOverloadPacket)):
            return ["torch", type(value).__name__, str(value)]
        if isinstance(value, (slice, range)):
            ends = (value.start, value.stop, value.step)
            return [type(value).__name__, *(self.of(each, within) for each in ends)]
        if isinstance(value, types.CodeType):
            self.codes[id(value)] = value
            return ["code", code_digest(value)]
        if isinstance(value, types.ModuleType):
            keys = [] if is_foreign_module(value.__name__) else sorted(vars(value))
            return ["module", check_module(value.__name__, value.__name__), digest_of(keys)]
        if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)):
            return self._of_builtin(value, within)
        if isinstance(value, torch.Tensor):
            return tensor_description(value)
        if isinstance(value, PurePath):
            raise NotCachedError(f"the step reads a path, {value}, and what lies there may differ")
        if isinstance(value, re.Pattern):  # as text it is cut short
            return ["pattern", self.of(value.pattern), value.flags]
        if isinstance(value, logging.Logger) or type(value).__module__ == "typing":
            return [type(value).__qualname__, str(value), str(getattr(value, "flags", ""))]
        if isinstance(value, _SLOTS):
            return ["slot", str(value)]
        if isinstance(value, (types.GenericAlias, types.UnionType)):
            return ["type", str(value)]
        return self._of_instance(value, within)

    def _of_instance(self, value: Any, within: tuple[int, ...]) -> Any:
        """The class, with the items of a container, or the number or text that an object is."""
        cls = type(value)
        strange = [base for base in cls.__mro__ if is_foreign_module(base.__module__) and not _is_known_base(base)]
        if strange:
            raise NotCachedError(
                f"the step reads a {cls.__module__}.{cls.__qualname__}, which no other process can compare"
            )
        description = ["object", self.of_class(cls)]
        if isinstance(value, dict):
            items: Any = collections.OrderedDict.items if isinstance(value, collections.OrderedDict) else dict.items
            description += [[self._key(k, within), self.of(v, within)] for k, v in items(value)]
            description.append(self.of(getattr(value, "default_factory", None), within))
        elif isinstance(value, (set, frozenset)):
            if len(value) > 1 and not all(type(each) in (int, bool) for each in value):
                raise NotCachedError("the step reads a set, whose order differs from process to process")
            description += sorted((self._key(each, within) for each in value), key=json.dumps)
        elif isinstance(value, CONTAINERS):
            description += [self.of(each, within) for each in value]
            description.append(self.of(getattr(value, "maxlen", None), within))
        elif isinstance(value, _WHOLE):
            plain: Any = next(base for base in _WHOLE if isinstance(value, base))
            description += [plain.__repr__(value), self.of(getattr(value, "__dict__", {}), within)]
        return description

    def _key(self, key: Any, within: tuple[int, ...]) -> Any:
        """The description of a key of a dict, or an entry of a set: no object, whose attributes no trace sees."""
        for each in key if isinstance(key, (tuple, frozenset)) else ():
            self._key(each, within)
        description = self.of(key, within)
        if description[0] == "object" and not isinstance(key, (*_WHOLE, tuple, frozenset)):
            raise NotCachedError(f"the step reads a dict or set of {type(key).__name__} objects")
        return description

    def _of_builtin(self, value: Any, within: tuple[int, ...]) -> Any:
        if value in _UNSAFE:
            raise NotCachedError(f"the step uses {value.__name__}(), which may give something else in another process")
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            module = str(getattr(value, "__module__", None) or "builtins")
            if not is_foreign_module(module):
                raise NotCachedError(f"the step uses {module}.{value.__name__}, whose code is made in C")
            return ["builtin", check_module(module, f"{module}.{value.__name__}"), value.__qualname__]
        return ["builtin", value.__qualname__, self.of(owner, within)]

    def of_function(self, function: types.FunctionType) -> Any:
        """The code, defaults and closure of a function; where its code did not run, of these what can be described."""
        found = self._functions.get(id(function))
        if found is None:
            name = f"{function.__module__}.{function.__qualname__}"
            self._functions[id(function)] = function, ["function", name]  # for one that reaches itself
            found = self._functions[id(function)] = function, self._parts(function, name)
        return found[1]

    def _parts(self, function: types.FunctionType, name: str) -> list[Any]:
        code = self.codes[id(function.__code__)] = function.__code__
        if is_foreign_code(code, function.__globals__):
            if code.co_filename.startswith("<") and not code.co_filename.startswith(_GENERATED):
                raise NotCachedError(f"the step uses {name}, whose code and globals have neither a file nor a module")
            module = str(function.__globals__.get("__name__", "builtins"))
            check_module(f"{module}.{function.__name__}", name)
        describe = self.of if id(code) in self.ran else self.if_possible
        cells = [self._cell(cell, describe) for cell in function.__closure__ or ()]
        held = [getattr(function, "__wrapped__", None), function.__name__, function.__doc__, _annotations(function)]
        notes = (
            [] if is_foreign_code(code, function.__globals__) else sorted(vars(function))
        )  # torch marks its own late
        return [
            *("function", name, code_digest(code), describe(function.__defaults__), describe(function.__kwdefaults__)),
            *(cells, digest_of([*map(self.if_possible, held), notes])),
        ]

    def _cell(self, cell: types.CellType, describe: Callable[[Any], Any]) -> Any:
        """The value of a closure variable; of one that no trace followed, only what it is as a whole counts."""
        try:
            value = cell.cell_contents
        except ValueError:
            return ["empty"]
        description = describe(value)
        if describe == self.of and id(cell) not in self.cells and description[0] == "object":
            raise NotCachedError(f"a method of the step's reads a {type(value).__name__} in its closure")
        return description

    def if_possible(self, value: Any) -> Any:
        """The description of ``value``, or its type alone."""
        try:
            return self.of(value)
        except NotCachedError:
            return ["a", f"{type(value).__module__}.{type(value).__qualname__}"]

    def in_parts(self, value: Any, within: tuple[int, ...] = ()) -> Any:
        """The description of ``value``; where that is impossible, those of its entries, as far as they are possible."""
        found = self.if_possible(value)
        if found[0] != "a" or not isinstance(value, CONTAINERS) or id(value) in within:
            return found
        within = (*within, id(value))
        values = [*value, *value.values()] if isinstance(value, dict) else [*value]
        parts = [self.in_parts(each, within) for each in values]
        return [*found, sorted(parts, key=json.dumps) if isinstance(value, (set, frozenset)) else parts]

    def of_class(self, cls: type) -> list[str]:
        """The name of a class, and of one of the user's a digest of all that it and its bases define."""
        name = f"{cls.__module__}.{cls.__qualname__}"
        if cls in _ALL_BASES:
            return ["class", cls.__module__, cls.__qualname__]
        if is_foreign_module(cls.__module__):
            return ["class", check_module(cls.__module__, name), cls.__qualname__]
        if id(cls) not in self._classes:
            self._classes[id(cls)] = cls, ["class", name]  # for one that reaches itself
            if has_registered_classes(cls):
                raise NotCachedError(f"classes are registered with {cls.__qualname__}")
            bases = [self.if_possible(base) for base in (*cls.__bases__, type(cls))]
            entries = [[key, self._entry(value)] for key, value in vars(cls).items() if key not in _NOT_OF_CODE]
            texts = [cls.__name__, repr(cls.__doc__), repr(sorted({*vars(cls)} - {"__slotnames__"}))]
            unnamed = [self.if_possible(each) for each in _read_by_python(cls)]
            self._classes[id(cls)] = cls, ["class", name, digest_of([bases, entries, texts, unnamed])]
        return self._classes[id(cls)][1]

    def _entry(self, value: Any) -> Any:
        """An entry of a class: code and plain values; guards compare others where the step reads them."""
        is_code = isinstance(value, (types.FunctionType, type)) or type(value) in CALLABLES
        if is_code and self.ran:
            return self.of(value) if _ran_in(value, self.ran) else self.if_possible(value)
        is_described = is_code or type(value) in (*_WHOLE, *CONTAINERS)
        return self.if_possible(value) if is_described else ["a", type(value).__qualname__]


def check_module(module: str, shown: str) -> str:
    """The name of a module; raises ``NotCachedError`` if its functions look at the outside world."""
    root, *rest = module.split(".")
    file = getattr(sys.modules.get(root), "__file__", None)
    if file and is_foreign_module(root) and not is_foreign_file(file):
        raise NotCachedError(f"the step uses {shown} of {file}, which has the name of a library")
    is_strange = is_foreign_module(module) and root not in PURE and root not in _PACKAGES
    is_of_process = root == "torch" and bool(rest) and (rest[0] in _OF_TORCH or rest[-1] in _READING)
    if is_strange or (is_of_process and tuple(rest[:2]) not in _ALLOWED):
        raise NotCachedError(f"the step uses {shown}, which may give something else in another process")
    return module


def _annotations(function: types.FunctionType) -> Any:
    try:
        return function.__annotations__
    except Exception:  # since 3.14 they are evaluated now
        return None


def _ran_in(value: Any, ran: Collection[int]) -> bool:
    code = getattr(value, "__code__", None) or getattr(getattr(value, "__func__", None), "__code__", None)
    return id(code) in ran


def _read_by_python(cls: type) -> Iterator[Any]:
    """Entries of a class that Python's own functions read, though the step's code may not name them."""
    for name, kind in vars(cls).get("__annotations__", {}).items():
        yield from (name, kind)
    if issubclass(cls, enum.Enum):
        for name, member in cls.__members__.items():
            yield from (name, member.value)
    if dataclasses.is_dataclass(cls):
        for each in dataclasses.fields(cls):
            yield from (each.name, each.default, each.default_factory, dict(each.metadata))


def _is_known_base(base: type) -> bool:
    return base in _ALL_BASES or (
        base.__module__.partition(".")[0] in _PACKAGES and issubclass(base, (nn.Module, Optimizer))
    )


def tensor_description(tensor: torch.Tensor) -> list[Any]:
    """A tensor that the step reads and that is no state, with a hash of its contents."""
    if (
        type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
    ):
        raise NotCachedError(f"the step reads a {type(tensor).__name__} on {tensor.device} that is no argument")
    if tensor.is_conj() or tensor.is_neg():
        raise NotCachedError("the step reads a tensor that is no argument, and that is conjugated or negated when read")
    with torch.no_grad():
        content: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    layout = (list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
    properties = (str(tensor.dtype), *layout, tensor.requires_grad)
    return ["tensor", *properties, hashlib.sha256(content).hexdigest()]
