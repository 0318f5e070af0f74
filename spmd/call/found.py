"""Find the models, optimizers and scalers that a step uses without taking them as arguments.

In: the step's function and its arguments. Out: the same ``Arguments``, with each module, optimizer and scaler that the
step's code reaches by name: attributes of the instance whose method it is, closure variables and globals, also in
lists, dicts, dataclasses and other objects of the user's. From here on they are state as arguments are.

Only what is named counts: names in the step's code, in methods of the instances that it reaches, and in the user's
functions that it calls. So a data set that an instance holds for another method is never looked at. What the search
misses is refused while the step is traced. Ranks search in the same order: that of code, of attributes and of entries.
"""

from __future__ import annotations

import argparse
import dis
import sys
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from .._torch import BUFFERS, CHILDREN, PARAMETERS
from ..interpreter.foreign_code import is_foreign_code, is_foreign_module, is_library_file
from .free_parameters import adopt, free_parameters
from .paths import Found, Path, cell_of, entry_of, field_of, global_of, item_of
from .state import Arguments, delegates, is_replaced, submodules_of

OWNERS = (nn.Module, torch.optim.Optimizer, GradScaler)

# Python's own classes whose objects hold what the user puts there.
_SETTINGS = (argparse.Namespace, types.SimpleNamespace, UserDict, UserList, ChainMap)
_STATE = {PARAMETERS, BUFFERS, CHILDREN}
_DESCRIPTORS: dict[type, str] = {  # of classes, each with the attribute that holds the function
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    cached_property: "func",
}
_ALWAYS = ("__call__", "__getattr__")  # methods that run without being named

Step = tuple[Path, Any]


def with_found(function: Callable[..., Any], given: Arguments) -> Arguments:
    """The arguments of a call, with what ``function`` reaches besides them. Its order is the same on all ranks."""
    roots = [(Path("", root=function), function)]
    roots += [(Path(leaf.name, leaf=k), leaf.value) for k, leaf in enumerate(given.leaves)]
    found = _Search().run(roots)
    modules = _new_modules([each for each in found if isinstance(each.value, nn.Module)], given)
    modules = _named(modules, given)
    known = given.with_found(modules)
    known = known.with_found(_free_parameters(roots, found, known))
    others = [each for each in found if not isinstance(each.value, nn.Module) and not _is_given(each.value, given)]
    return known.with_found(_named([each for each in others if _is_known(each.value, known)], known))


def _new_modules(found: list[Found], given: Arguments) -> list[Found]:
    """The modules with state that are neither arguments, nor parts of these or of each other."""
    known = {id(module) for _, module in submodules_of(given.modules)}
    inner = {id(part) for each in found for part in each.value.modules() if part is not each.value}
    new = [each for each in found if id(each.value) not in known | inner]
    return [each for each in new if any(True for _ in _tensors(each.value))]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _is_given(value: Any, given: Arguments) -> bool:
    """Whether a value is an argument, or wraps an optimizer, which is found by itself."""
    if isinstance(value, torch.optim.Optimizer) and delegates(value):
        return True
    return any(value is each for each in (*given.optimizers.values(), *given.scalers.values()))


def _is_known(value: Any, known: Arguments) -> bool:
    """Whether the parameters of an optimizer are those of known modules. One of others is refused where it is used."""
    if not isinstance(value, torch.optim.Optimizer):
        return True
    parameters = {id(parameter) for module in known.modules.values() for parameter in module.parameters()}
    return any(id(p) in parameters or is_replaced(p) for group in value.param_groups for p in group["params"])


def _free_parameters(roots: list[Step], found: list[Found], known: Arguments) -> list[Found]:
    """Modules for the parameters of optimizers that no module has, and that the step reaches by name."""
    optimizers = [Found(path, value) for path, value in roots if isinstance(value, torch.optim.Optimizer)]
    optimizers += [each for each in found if isinstance(each.value, torch.optim.Optimizer)]
    held = {id(parameter) for module in known.modules.values() for parameter in module.parameters()}
    free = {
        id(p): each
        for each in optimizers
        if not delegates(each.value)
        for group in each.value.param_groups
        for p in group["params"]
        if id(p) not in held and not is_replaced(p)
    }
    if not free:
        return []
    tensors = {id(each.value): each for each in _Search(free.keys()).run(roots) if id(each.value) in free}
    modules = []
    for optimizer in dict.fromkeys(free.values()):
        own = {tensors[key].name: tensors[key].value for key, of in free.items() if of is optimizer and key in tensors}
        if own:
            name = adopt(optimizer.value, own) or optimizer.name
            path = optimizer.path.to(free_parameters, "")
            path = Path(name, path.root, path.leaf, path.keys)
            modules.append(Found(path, free_parameters(optimizer.value, "")))
    return _named(modules, known)


def _named(found: list[Found], given: Arguments) -> list[Found]:
    """The same, with a number after each name that something else has."""
    taken = {*(leaf.name for leaf in given.leaves), *given.modules, *given.optimizers, *given.scalers}
    named = []
    for each in found:
        names = (each.name if k == 1 else f"{each.name} ({k})" for k in count(1))
        name = next(name for name in names if name not in taken)
        taken.add(name)
        path = each.path
        named.append(Found(Path(name, path.root, path.leaf, path.keys), each.value))
    return named


class _Search:
    """One search, breadth first, so that names are short; again for as long as it comes to code with new names."""

    def __init__(self, tensors: Container[int] = ()) -> None:
        """``tensors``: the ids of those that are looked for, too."""
        self._names: dict[str, None] = {}  # in code that the step may run, in order
        self._tensors = tensors

    def run(self, roots: list[Step]) -> list[Found]:
        """All owners of state, in the order in which they are found."""
        while True:
            names = len(self._names)
            found = list(self._pass(roots))
            if len(self._names) == names:
                return found

    def _pass(self, roots: list[Step]) -> Iterator[Found]:
        pending, seen = deque(roots), dict[int, Any]()
        while pending:
            path, value = pending.popleft()
            if id(value) in seen or self._is_plain(value):
                continue
            seen[id(value)] = value
            if isinstance(value, torch.Tensor):
                yield Found(path, value)
                continue
            if isinstance(value, OWNERS):
                yield Found(path if path.name else Path("self", path.root), value)
            pending += self._steps(path, value)

    def _steps(self, path: Path, value: Any) -> Iterator[Step]:
        """Yield the objects that a value refers to, each with its path."""
        if isinstance(value, types.FunctionType):
            yield from self._of_function(path, value)
        elif isinstance(value, types.MethodType):
            code = getattr(value.__func__, "__code__", None)
            name = code.co_varnames[0] if code and code.co_argcount else "self"
            yield path.to(_attribute, "__self__", "" if path.name else name), value.__self__
            yield path.to(_attribute, "__func__"), value.__func__
        elif isinstance(value, partial):
            for key in ("func", "args", "keywords"):
                yield path.to(_attribute, key), getattr(value, key)
        elif type(value) in _DESCRIPTORS:
            key = _DESCRIPTORS[type(value)]
            yield path.to(_attribute, key), getattr(value, key)
        elif isinstance(value, (list, tuple)):
            kind: Any = list if isinstance(value, list) else tuple
            held = enumerate(kind.__iter__(value))  # not what a subclass makes anew when it is read, without end
            yield from ((path.to(item_of, k, str(k)), item) for k, item in held if not self._is_plain(item))
        elif isinstance(value, dict):
            yield from (
                (path.to(item_of, k, str(k)), item) for k, item in dict.items(value) if not self._is_plain(item)
            )
        elif isinstance(value, (type, types.ModuleType)):
            yield from self._of_namespace(path, value)
        elif not isinstance(value, GradScaler):
            yield from self._of_object(path, value)

    def _is_plain(self, value: Any) -> bool:
        """Whether a value leads to nothing."""
        if isinstance(value, torch.Tensor):
            return id(value) not in self._tensors
        return value is None or type(value) in weakref.ProxyTypes or isinstance(value, (str, bytes, int, float))

    def _of_function(self, path: Path, function: types.FunctionType) -> Iterator[Step]:
        """The closure variables of a function, and the globals that its code names."""
        if hasattr(function, "__wrapped__"):  # by torch.no_grad(), say, whose own code is not the user's
            yield path.to(_attribute, "__wrapped__"), function.__wrapped__
        if is_foreign_code(function.__code__, function.__globals__):
            return
        for code in _codes(function.__code__):
            self._names.update(dict.fromkeys((*code.co_names, *_strings(code.co_consts))))
        for key in ("__defaults__", "__kwdefaults__"):
            if getattr(function, key) is not None:
                yield path.to(_attribute, key), getattr(function, key)
        for k, variable in enumerate(function.__code__.co_freevars):
            with suppress(ValueError):  # it has no value yet
                yield path.to(cell_of, k, variable), cell_of(function, k)
        for key in _globals_in(function.__code__):
            value = function.__globals__.get(key)
            if not _is_of_library(value, function.__code__.co_filename):
                yield path.to(global_of, key, key), value

    def _of_namespace(self, path: Path, holder: type | types.ModuleType) -> Iterator[Step]:
        """The named entries of a class or a module of the user's."""
        name = holder.__module__ if isinstance(holder, type) else holder.__name__
        if is_foreign_module(name):
            return
        for key in (key for key in vars(holder) if key in self._names):
            yield path.to(field_of, key, key), vars(holder)[key]

    def _of_object(self, path: Path, value: Any) -> Iterator[Step]:
        """The named attributes of an object, with the methods of its class; of modules and optimizers, optimizers."""
        cls = type(value)
        is_owner = isinstance(value, OWNERS)
        if is_foreign_module(cls.__module__) and not is_owner and not issubclass(cls, _SETTINGS):
            if "__wrapped__" in _fields(value):  # a compiled step that this one calls
                yield path.to(field_of, "__wrapped__"), vars(value)["__wrapped__"]
            return
        for key, field in list(_fields(value).items()):
            is_inner = is_owner and isinstance(field, torch.optim.Optimizer)
            if not is_inner and (key not in self._names or (is_owner and key in _STATE)):
                continue
            yield path.to(field_of, key, key), field
        for base in cls.__mro__:
            if is_foreign_module(base.__module__):
                continue
            for key, entry in list(vars(base).items()):
                if isinstance(entry, types.MemberDescriptorType) and key in self._names and hasattr(value, key):
                    yield path.to(_attribute, key, key), getattr(value, key)
                elif key in self._names or key in _ALWAYS:
                    yield path.to(entry_of, key, key), entry


def _attribute(holder: Any, key: str) -> Any:
    return getattr(holder, key)


def _fields(value: Any) -> dict[str, Any]:
    """The attributes that an object holds itself, read past what may watch it."""
    try:
        fields: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return fields if isinstance(fields, (dict, OrderedDict)) else {}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    """The strings among constants of code, also in tuples and sets of them."""
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, (tuple, frozenset)):
            yield from _strings(each)


@lru_cache(maxsize=4096)  # codes are read again at each compile, and each time that a search goes further
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals that code reads, in order, each once."""
    instructions = (each for part in _codes(code) for each in dis.get_instructions(part))
    return tuple(dict.fromkeys(each.argval for each in instructions if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")))


def _is_of_library(value: Any, file: str) -> bool:
    """Whether a function, class or module comes from an installed library, and not from ``file`` itself."""
    if isinstance(value, types.FunctionType):
        other = value.__code__.co_filename
    elif isinstance(value, type):
        other = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    elif isinstance(value, types.ModuleType):
        other = getattr(value, "__file__", None) or ""
    else:
        return False
    return other != file and is_library_file(other)
