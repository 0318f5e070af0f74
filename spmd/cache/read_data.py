"""Reads of a trace as data: sites by path, with descriptions of their values; and the same bound to live objects.

Bound to other objects it holds only if a trace would read the same: every value, global and container has the same
description, objects are shared as they were, and the code that ran is what would run.
"""

from __future__ import annotations

import builtins
import gc
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from ..python_state.reads import CONTAINERS, MISSING, ContainerSnapshot, Reads, ReadSite, content_of, is_plain
from .code_digests import nested_codes
from .described import CALLABLES, Describer, digest_of
from .impure_reads import globals_of
from .library_code import is_of_library, variables_named
from .not_cached import NotCachedError
from .paths import Path, Search, follow, values_of


@dataclass(eq=False)
class StoredReads(Reads):
    """The reads of an earlier trace, bound to the objects of this process; ``kept``: the sites of its inputs."""

    stored_names: frozenset[str] = frozenset()
    kept: list[ReadSite] = field(default_factory=list)

    def names_in_code(self) -> set[str]:
        """The names in the code that ran then, which is the code that would run now."""
        return set(self.stored_names)


@dataclass
class Placed:
    """The objects that were read from, each with its path; ``numbers``: by the id of an object, that of its path."""

    paths: list[Path] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    _seen: dict[int, tuple[int, Any]] = field(default_factory=dict)  # by id, the order in which values were seen

    def add(self, path: Path, value: Any) -> int:
        """The number of an object. Raises ``NotCachedError`` if another path leads to it."""
        if id(value) in self.numbers:
            raise NotCachedError("two objects that the step reads are one")
        self.paths.append(path)
        self.objects.append(value)
        self.numbers[id(value)] = len(self.paths) - 1
        return len(self.paths) - 1

    def shared(self, value: Any, seen: tuple[int, ...] = ()) -> list[Any]:
        """Identities of a value and of the objects in it: two sites may lead to one object."""
        if is_plain(value):
            return []
        own = self.numbers.get(id(value), -1)
        order = self._seen.setdefault(id(value), (len(self._seen), value))[0]
        fields = self.numbers.get(id(getattr(value, "__dict__", None)), -1)
        inside = () if id(value) in seen else _parts_of(value)
        return [order, own, fields, *(self.shared(each, (*seen, id(value))) for each in inside)]


def _parts_of(value: Any) -> Sequence[Any]:
    """The entries of a container, keys, too, and what a method or ``partial`` is made of."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, CONTAINERS):
        return [*value]
    return [getattr(value, key) for key in CALLABLES.get(type(value), ())]


def reads_to_data(
    reads: Reads,
    function: Callable[..., Any],
    leaves: Sequence[Any],
    names: Mapping[int, str],
    kept: Sequence[ReadSite] = (),
) -> tuple[dict[str, Any], Placed]:
    """Describe reads of a trace, for JSON. Raises ``NotCachedError`` for what no other process can find or compare.

    ``names``: of the call's state, modules and optimizers, by id; ``kept``: the sites of numbers that are inputs.
    """
    _check_recorded(reads)
    sites, containers = sites_of(reads), [each for each in reads.containers.values() if each.content is not None]
    cells = {id(site.holder) for site in sites if site.kind == "cell"}
    describer = Describer(names, {*_users_code(reads)}, cells)
    found, placed = Search(function, leaves, reads).run(), Placed()
    without = [each for each in containers if id(each.value) not in found]
    if without and not _holders(without):  # objects had them that the step made itself
        containers = [each for each in containers if id(each.value) in found]
    for holder, name in [
        *((site.holder, site.name) for site in sites),
        *((each.value, each.name) for each in containers),
        *((site.holder, site.name) for site in kept),
    ]:
        if id(holder) not in found:
            raise NotCachedError(f"no path from the step leads to {name}")
        if id(holder) not in placed.numbers:
            placed.add(found[id(holder)], holder)
    data = {
        "paths": placed.paths,
        "sites": [_site(site, placed, describer) for site in sites],
        "constants": [k for k, site in enumerate(sites) if id(site.get()) in reads.constants],
        "containers": [_container(each, placed, describer) for each in containers],
        "kept": [_kept(site, placed) for site in kept],
        "globals": [[_module_of(space), key, _global(space, key, describer)] for space, key in globals_of(reads)],
        "modules": [_module(name, describer) for name in sorted({_module_of(space) for space in reads.namespaces})],
        "names in code": sorted(reads.names_in_code()),
    }
    data["variables"] = variables_named([*reads.code, *describer.codes.values()])
    _check_code(reads, describer)
    if contents := [each for each in reads.contents if not each.is_of_environment]:  # only libraries may have read it
        raise NotCachedError(f"the step reads {contents[0].name}, and no entry holds what is in it")
    return data, placed


def _holders(containers: Sequence[ContainerSnapshot]) -> list[Any]:
    """All that has one of the containers, but for what a trace notes of them, also by their ids."""
    notes = {id(each) for one in containers for each in (one, vars(one))}
    held = [each.value for each in containers]
    found = [each for each in gc.get_referrers(*held) if id(each) not in notes and each is not held]
    return [each for each in found if type(each) is not dict or all(each.get(id(value)) is not value for value in held)]


def bind_reads(
    data: Mapping[str, Any], function: Callable[..., Any], leaves: Sequence[Any], names: Mapping[int, str]
) -> tuple[StoredReads, Placed]:
    """The same of live objects. Raises ``NotCachedError``, with the first difference, if a trace would read another.

    Values are described in the order of ``reads_to_data``: what refers to itself is cut where it is reached first.
    """
    placed, describer = Placed(), Describer(names)
    for path in data["paths"]:
        placed.add(path, follow(path, function, leaves))
    reads = StoredReads(stored_names=frozenset(data["names in code"]))
    for kind, number, key, name, owned, *described in data["sites"]:
        site = ReadSite(kind, placed.objects[number], key, name, owned)
        _compare(name, [kind, number, key, name, owned, *described], _site(site, placed, describer))
        reads.sites[site.address] = site
    sites = [*reads.sites.values()]
    reads.constants.update(id(sites[k].get()) for k in data["constants"])
    for number, name, owned, *described in data["containers"]:
        value = placed.objects[number]
        snapshot = ContainerSnapshot(name, value, content_of(value), owned)
        _compare(name, [number, name, owned, *described], _container(snapshot, placed, describer))
        reads.containers[id(value)] = snapshot
    for kind, number, key, name, owned, held in data["kept"]:
        site = ReadSite(kind, placed.objects[number], key, name, owned)
        _compare(name, held, type(site.get()).__name__)
        reads.kept.append(site)
    for name, key, description in data["globals"]:
        _compare(f"the global {key} of {name}", description, _global(vars(sys.modules[name]), key, describer))
    for variable, value in data["variables"]:
        _compare(f"the variable {variable} of the environment", value, os.environ.get(variable))
    for module in data["modules"]:
        _compare(f"the code of {module[0]}", module, _module(module[0], describer))
    return reads, placed


def sites_of(reads: Reads) -> list[ReadSite]:
    """The sites that a trace read, without those of the tracer's own module, which holds constants."""
    return [site for site in reads.sites.values() if not str(site.key).startswith("_tensor_constant")]


def _check_recorded(reads: Reads) -> None:
    """Raise ``NotCachedError`` for what is no read of a value: logs, prints, references to state."""
    if reads.journals.by_id or reads.journals.logged():
        raise NotCachedError("the step writes to a log or prints")
    if reads.layouts_read:
        raise NotCachedError("the step asks for strides of tensors")
    if reads.taken:
        raise NotCachedError("the step takes the values of a tensor that is no argument")
    if reads.references:
        raise NotCachedError(f"{reads.references[0].name} refers to state besides its module")
    if any(site.kind == "item now" for site in reads.sites.values()):
        raise NotCachedError("the step reads entries of a dict that it writes to")


def _site(site: ReadSite, placed: Placed, describer: Describer) -> list[Any]:
    value = values_of(site.key, site.get())
    if type(site.key) not in (str, int):
        raise NotCachedError(f"{site.name} is read by a key that is neither text nor an int")
    number = placed.numbers[id(site.holder)]
    return [
        site.kind,
        number,
        site.key,
        site.name,
        site.owned,
        _described(site.name, value, describer, placed.paths[number][0]),
        placed.shared(value),
    ]


def _kept(site: ReadSite, placed: Placed) -> list[Any]:
    """A site of which each call reads the number; of that the type counts."""
    if type(site.key) not in (str, int):
        raise NotCachedError(f"{site.name} is read by a key that is neither text nor an int")
    held = type(site.get()).__name__
    return [site.kind, placed.numbers[id(site.holder)], site.key, site.name, site.owned, held]


def _global(namespace: dict[str, Any], key: str, describer: Describer) -> Any:
    if key not in namespace and key in vars(builtins):
        return ["of Python", digest_of(repr(type(vars(builtins)[key]))), key]  # the surroundings have all of them
    describe = describer.in_parts if is_of_library(namespace.get("__name__")) else describer.of
    return describe(namespace.get(key, MISSING))


def _described(name: str, value: Any, describer: Describer, root: list[Any]) -> Any:
    """The description of what a path from ``root`` leads to; from a module of a library, as far as that is possible."""
    kind, module = root
    if kind == "module" and is_of_library(module):
        return describer.in_parts(value)
    try:
        return describer.of(value)
    except NotCachedError as error:
        raise NotCachedError(f"{error} ({name})") from None


def _container(each: ContainerSnapshot, placed: Placed, describer: Describer) -> list[Any]:
    number = placed.numbers[id(each.value)]
    value = values_of(placed.paths[number][-1][-1], each.value)
    described = _described(each.name, value, describer, placed.paths[number][0])
    return [number, each.name, each.owned, described, placed.shared(value)]


def _module_of(namespace: dict[str, Any]) -> str:
    """The name of the module with these globals. Raises ``NotCachedError`` for a dict in which code was run."""
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is None or vars(module) is not namespace:
        raise NotCachedError(f"code of the step runs in a namespace of no module ({name})")
    return str(name)


def _module(name: str, describer: Describer) -> list[Any]:
    """A module's name, a hash of its file, and of the functions and classes that it defines."""
    module = sys.modules.get(name)
    if module is None:
        raise NotCachedError(f"the module {name} is not imported")
    file = getattr(module, "__file__", None)
    content = File(file).read_bytes() if file and File(file).is_file() else b""
    keys = sorted(key for key in vars(module) if not key.startswith("__"))
    return [name, hashlib.sha256(content).hexdigest(), digest_of(keys), dict(_definitions(module, describer))]


def _definitions(module: types.ModuleType, describer: Describer) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            yield key, describer.of_function(value)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            yield key, describer.of_class(value)


def _users_code(reads: Reads) -> dict[int, types.CodeType]:
    """The code that ran, but for that of libraries, by id."""
    pairs = zip(reads.code, reads.namespaces, strict=True)
    return {id(code): code for code, space in pairs if not is_of_library(space.get("__name__"))}


def _check_code(reads: Reads, describer: Describer) -> None:
    """Raise ``NotCachedError`` if code ran that belongs to nothing described: other code might run elsewhere."""
    ran = _users_code(reads)
    made = {id(each) for code in ran.values() for each in nested_codes(code)}
    described = {id(each) for code in describer.codes.values() for each in (code, *nested_codes(code))}
    for key, code in ran.items():
        if key not in described and key not in made and code.co_name != "<module>":
            raise NotCachedError(f"no path from the step leads to the code of {code.co_qualname}, which ran")


def _compare(name: str, was: Any, now: Any) -> None:
    if json.dumps(was) != json.dumps(now):
        raise NotCachedError(f"{name} is not as it was")
