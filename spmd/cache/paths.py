"""Paths to the objects that a trace read from, by which another process finds its own.

A path begins at the step, an argument or a module, and goes on by what the trace read, too, such as an attribute.
Objects are found breadth first, so each has one path, the shortest.
"""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .._torch import CHILDREN, HOOK_DICTS, OPTIMIZER_HOOK_DICTS
from ..python_state.reads import Reads
from .described import CALLABLES
from .not_cached import NotCachedError

Path = list[list[Any]]  # the root, then each step: a kind, and mostly a key
_HOOKS = HOOK_DICTS | OPTIMIZER_HOOK_DICTS
_NAMESPACES = ("vars", "globals", "module")  # steps to a dict of which only the entries count that were read

_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "vars": lambda value, _: vars(value),
    "globals": lambda value, _: value.__globals__,
    "entry": lambda value, key: vars(value)[key],
    "item": lambda value, key: dict.__getitem__(value, key) if isinstance(value, dict) else value[key],
    "nth": lambda value, key: list(value.values())[key],
    "attribute": lambda value, key: getattr(value, key),
    "cell": lambda value, key: value.__closure__[key],
    "contents": lambda value, _: value.cell_contents,
    "type": lambda value, _: type(value),
    "base": lambda value, key: value.__mro__[key],
}


def follow(path: Path, function: Any, leaves: Sequence[Any]) -> Any:
    """The object at a path now. Raises ``NotCachedError`` where the path ends early."""
    (kind, key), *steps = path
    try:
        value = function if kind == "step" else leaves[key].value if kind == "leaf" else vars(sys.modules[key])
        for name, *keys in steps:
            value = _STEPS[name](value, keys[0] if keys else None)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise NotCachedError(f"there is nothing at {_shown(path)}") from error
    return value


def values_of(key: Any, value: Any) -> Any:
    """``value``, or its values alone if it holds hooks of torch's: their keys count the hooks of a process."""
    return list(value.values()) if key in _HOOKS and isinstance(value, dict) else value


def _shown(path: Path) -> str:
    return ".".join(str(each[-1]) for each in path)


def _path_by_name(value: Any) -> Path:
    """The path to a class or function from its module, by its name there; empty if it has none."""
    name, module = getattr(value, "__qualname__", ""), sys.modules.get(getattr(value, "__module__", None) or "")
    if not isinstance(value, (type, types.FunctionType)) or module is None or "<locals>" in name:
        return []
    first, *rest = name.split(".")
    path: Path = [["module", module.__name__], ["item", first], *(["entry", each] for each in rest)]
    try:
        return path if follow(path, None, ()) is value else []
    except NotCachedError:
        return []


@dataclass
class Search:
    """A search along what a trace read, for the paths of all that it read from."""

    function: Any
    leaves: Sequence[Any]
    reads: Reads

    def __post_init__(self) -> None:
        self.keys: dict[int, list[Any]] = collections.defaultdict(list)  # of sites, by the id of what holds them
        for site in self.reads.sites.values():
            self.keys[id(site.holder)].append(site.key)
        self.found: dict[int, Path] = {}
        self._alive: list[Any] = []  # so that ids stay unique

    def run(self) -> dict[int, Path]:
        """The path of each object that was reached, by its id."""
        roots: list[tuple[Path, Any]] = [([["step", 0]], self.function)]
        roots += [([["leaf", k]], leaf.value) for k, leaf in enumerate(self.leaves)]
        roots += [([["module", name]], variables) for name, variables in self._modules()]
        self._extend(roots)
        for site in self.reads.sites.values():  # of classes that nothing leads to but their names
            if id(site.holder) not in self.found and (path := _path_by_name(site.holder)):
                self._extend([(path, site.holder)])
        return self.found

    def _extend(self, roots: list[tuple[Path, Any]]) -> None:
        pending = collections.deque(roots)
        while pending:
            path, value = pending.popleft()
            if id(value) not in self.found:
                self.found[id(value)] = path
                self._alive.append(value)
                pending += [([*path, step], each) for step, each in self._steps(path[-1][0], path[-1][-1], value)]

    def _modules(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The modules of code that ran, and of namespaces that it read."""
        namespaces = [
            *self.reads.namespaces,
            *(site.holder for site in self.reads.sites.values() if site.kind == "item"),
        ]
        for variables in {id(each): each for each in namespaces if isinstance(each, dict)}.values():
            name = variables.get("__name__")
            module = sys.modules.get(name) if isinstance(name, str) else None
            if isinstance(name, str) and module is not None and vars(module) is variables:
                yield name, variables

    def _steps(self, came_by: str, key: Any, value: Any) -> Iterator[tuple[list[Any], Any]]:
        """The steps from a value, each with what it leads to; ``came_by`` and ``key``: the last step to it."""
        if came_by in _NAMESPACES:
            yield from ((["item", key], value[key]) for key in self._read(value) if key in value)
        elif type(value) in (list, tuple, collections.deque):
            yield from ((["item", k], each) for k, each in enumerate(value))
        elif values_of(key, value) is not value:
            yield from ((["nth", k], each) for k, each in enumerate(value.values()))
        elif isinstance(value, dict):
            pairs = [(key, each) for key, each in dict.items(value) if type(key) in (str, int, bool)]
            yield from ((["item", key], each) for key, each in pairs)
        elif isinstance(value, types.CellType):
            yield from self._of_cell(value)
        elif isinstance(value, type):
            yield from ((["base", k], each) for k, each in enumerate(value.__mro__) if k and id(each) not in self.found)
            yield from ((["entry", key], vars(value)[key]) for key in self.keys[id(value)] if key in vars(value))
        elif type(value) in CALLABLES:
            yield from ((["attribute", key], getattr(value, key)) for key in CALLABLES[type(value)])
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif not isinstance(value, (types.ModuleType, str, int, float, bytes)) and value is not None:
            yield ["type"], type(value)
            yield from ((["attribute", key], getattr(value, key, None)) for key in self.keys[id(value)])
        if hasattr(value, "__dict__") and not isinstance(value, type):
            yield ["vars"], vars(value)

    def _read(self, namespace: dict[str, Any]) -> list[Any]:
        """The keys of a namespace that were read, with those that lead to submodules, hooks, and containers read from.

        To copy an object reads its containers, and no attribute by name.
        """
        known = [key for key in (CHILDREN, *sorted(HOOK_DICTS)) if key in namespace]
        holding = [key for key, each in namespace.items() if id(each) in self.reads.containers]
        return [*dict.fromkeys([*self.keys[id(namespace)], *known, *holding])]

    def _of_cell(self, cell: types.CellType) -> Iterator[tuple[list[Any], Any]]:
        if self.keys[id(cell)]:
            try:
                yield ["contents"], cell.cell_contents
            except ValueError:
                return

    def _of_function(self, function: types.FunctionType) -> Iterator[tuple[list[Any], Any]]:
        yield from ((["cell", k], cell) for k, cell in enumerate(function.__closure__ or ()))
        yield from ((["attribute", key], getattr(function, key)) for key in ("__defaults__", "__kwdefaults__"))
        if hasattr(function, "__wrapped__"):
            yield ["attribute", "__wrapped__"], function.__wrapped__
        yield ["globals"], function.__globals__
