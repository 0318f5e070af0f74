"""``docs/api.md`` from the docstrings of the public names; ``pytest tests/test_docs.py --renew`` writes it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from inspect import cleandoc
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, Protocol, get_args, get_origin

import passes
import spmd

TOPICS = {
    "Compile": "compile CompiledStep Override Report",
    "Parallel modes": "DataParallel Auto DTensorExpand ParallelMode PlannedMode Plan",
    "Annotations": "replicate fully_shard MixedPrecisionPolicy OffloadPolicy no_sync constrain contract",
    "State": "materialize from_pretrained unshard generate state_dict save load export publish subscribe",
    "Ranks, data and random numbers": "world data_rank pad_to_longest shared_rng seed rng_state set_rng_state",
    "See and prove": "verify Verdict certify Certificate show plan Plans",
    "Rules and placements": "register_rule partition Problem Solver Assignment Choice Program",
    "Errors": "SpmdError CaptureError PlacementError PartitionError PassError MemoryBudgetError RankMismatchError "
    "RankFailedError",
}
FOLDERS = "pipeline ir analysis cleanup communication update memory schedule regions"  # of passes, in order
WIDTH = 120
HEAD = """# API

The public names, from their docstrings; what is not here is private. A test holds this page to them, and `pytest
tests/test_docs.py --renew` writes it anew. The [guide](guide.md) has the same by subject, with examples.
"""


def page() -> str:
    """The text of the page."""
    names = [name for listed in TOPICS.values() for name in listed.split()]
    assert sorted(names) == sorted(spmd.__all__), "TOPICS has each public name of spmd once"
    topics = {f"spmd: {topic[0].lower()}{topic[1:]}": listed.split() for topic, listed in TOPICS.items()}
    parts = [HEAD, _contents([*topics, *_topics_of_passes()])]
    for topic, listed in topics.items():
        parts += [f"## {topic}\n", *(entry(spmd, name) for name in listed)]
    for topic, listed in _topics_of_passes().items():
        parts += [f"## {topic}\n", *(entry(passes, name) for name in listed)]
    return "\n".join(parts)


def _topics_of_passes() -> dict[str, list[str]]:
    """The public names of ``passes`` by the folder that they stand in; without those that ``spmd`` hands on."""
    found: dict[str, list[str]] = {}
    for name in passes.__all__:
        if name not in spmd.__all__:
            where = getattr(getattr(passes, name), "__module__", "passes.ir").split(".")
            folder = where[1] if len(where) > 2 else "pipeline"
            found.setdefault(f"passes: {folder}", []).append(name)
    return {topic: found[topic] for topic in (f"passes: {folder}" for folder in FOLDERS.split())}


def _contents(topics: list[str]) -> str:
    links = [f"[{topic}](#{re.sub(r'[^a-z -]', '', topic.lower()).replace(' ', '-')})" for topic in topics]
    return _wrapped(links, " · ") + "\n"


def _wrapped(words: list[str], between: str) -> str:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1] + between + word) > WIDTH - 2:
            lines[-1] += between.rstrip()
            lines.append(word)
        else:
            lines[-1] += between + word
    return "\n".join(lines)


def entry(package: ModuleType, name: str) -> str:
    """The heading, signature and docstring of one name, and what a class or module has."""
    thing = getattr(package, name)
    parts = [f"### {package.__name__}.{name}\n"]
    if callable(thing) and (not inspect.isclass(thing) or _takes_arguments(thing)):
        parts.append(f"```py\n{signature(thing, f'{package.__name__}.{name}')}\n```\n")
    parts.append(_markdown(_docstring(thing) if _has_docstring(thing) else _docstring_below(package, name)) + "\n")
    if inspect.isclass(thing) and (constants := _constants(thing)):
        parts.append(_wrapped([f"`{each}`" for each in constants], ", ") + "\n")
    parts += [_member(member, each) for member, each in _members(thing)]
    return "\n".join(parts)


def _constants(kind: type) -> list[str]:
    """The names under which a class has instances of itself, such as the members of an enumeration."""
    if issubclass(kind, Enum):
        return [each.name for each in kind]
    return [name for name, each in vars(kind).items() if type(each) is kind]


def _takes_arguments(kind: type) -> bool:
    """Whether users make instances with arguments: not of errors, enumerations and base classes, nor of steps."""
    return "__init__" in vars(kind) and not issubclass(kind, (BaseException, Protocol, spmd.CompiledStep))


def _has_docstring(thing: Any) -> bool:
    return inspect.ismodule(thing) or callable(thing)


def _docstring(thing: Any) -> str:
    text = inspect.getdoc(thing)
    assert text, f"{thing!r} has a docstring"
    return text


def _docstring_below(package: ModuleType, name: str) -> str:
    """The docstring of a constant: the string below its assignment."""
    for module in [each for key, each in sys.modules.items() if key.startswith(f"{package.__name__}.")]:
        for before, each in pairwise(ast.parse(inspect.getsource(module)).body if name in vars(module) else []):
            is_it = isinstance(before, ast.AnnAssign) and ast.unparse(before.target) == name
            if is_it and isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                return cleandoc(each.value.value)
    raise AssertionError(f"{name} has a docstring")


def _markdown(text: str) -> str:
    """A docstring with its code as Markdown has it, also blocks of it, which stand behind ``::``."""
    text = re.sub(r"(?<!`)``(?!`)", "`", text)
    return re.sub(
        r"::\n\n((?:(?: {4}.*)?(?:\n|$))+)", lambda found: f":\n\n```py\n{cleandoc(found[1])}\n```\n\n", text
    ).strip()


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, its bases' of this project included; the functions of a module."""
    if inspect.ismodule(thing):
        yield from ((name, getattr(thing, name)) for name in thing.__all__)
    if not inspect.isclass(thing) or issubclass(thing, BaseException):
        return
    seen = set()
    for kind in thing.__mro__:
        for name, each in vars(kind).items() if kind.__module__.partition(".")[0] in ("spmd", "passes") else ():
            made = isinstance(each, (property, classmethod, staticmethod)) or inspect.isfunction(each)
            is_known = name in seen or (name == "rewrite" and thing is not passes.Pass)  # each pass has it
            if made and name[0] != "_" and not is_known:
                seen.add(name)
                yield name, each


def _member(name: str, member: Any) -> str:
    """An item of a list: the call, or the name of a property, and the docstring."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    text = _docstring(function)
    is_called = not isinstance(member, property) and (not inspect.isclass(member) or _takes_arguments(member))
    shown = signature(function, name, short=True) if is_called else name
    shown = shown if len(shown) < WIDTH - 8 else f"{name}(...)"
    first, *rest = _markdown(f"`{shown}`: {text}").splitlines()
    if len(first) > WIDTH - 2:
        first = f"`{shown}`:\n  " + _markdown(text).splitlines()[0]
    return "\n".join([f"- {first}", *(f"  {line}".rstrip() for line in rest)]) + "\n"


def is_public(parameter: inspect.Parameter) -> bool:
    return parameter.name not in ("self", "cls") and parameter.name[0] != "_"


def signature(thing: Any, name: str, short: bool = False) -> str:
    """The call as text: with types, a parameter a line where it is long; ``short``: names alone."""
    function = thing.__init__ if inspect.isclass(thing) else thing
    names = vars(sys.modules[thing.__module__])
    parameters = [each for each in inspect.signature(function).parameters.values() if is_public(each)]
    shown = list(_parameters(parameters, names, short))
    result = (
        "" if short or inspect.isclass(thing) else f" -> {_type(inspect.signature(thing).return_annotation, names)}"
    )
    line = f"{name}({', '.join(shown)}){result}"
    if short or len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){result}"])


def _parameters(parameters: list[inspect.Parameter], names: dict[str, Any], short: bool) -> Iterator[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    is_open = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not is_open:
            yield "*"
        is_open |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        text = stars.get(each.kind, "") + each.name
        typed = not short and each.annotation is not each.empty
        text += f": {_type(each.annotation, names)}" if typed else ""
        if each.default is not each.empty:
            equals = " = " if typed else "="
            text += equals + _default(each.default)
        yield text


def _type(annotation: Any, names: dict[str, Any]) -> str:
    """A type as source, with the values of the literals that it names."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"\b[A-Z]\w+", lambda word: _literal(names.get(word[0])) or word[0], text)


def _literal(kind: Any) -> str:
    return " | ".join(f'"{value}"' for value in get_args(kind)) if get_origin(kind) is Literal else ""


def _default(value: Any) -> str:
    """A default as source; that of a field with a factory, or of an object, by its kind."""
    if value is None or isinstance(value, (bool, int, float, str, tuple)):
        return repr(value).replace("'", '"') if isinstance(value, str) else repr(value)
    if is_dataclass(value) or inspect.isclass(value):
        return repr(value) if not inspect.isclass(value) else value.__name__
    return "..."
