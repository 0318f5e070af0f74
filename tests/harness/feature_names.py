"""Files that name a feature outside of its folder, found by ``ast``: imports from it, and reads of what it owns.

A feature's home has ``OWNS``: identifiers that belong to the feature wherever they are defined, such as options, roles,
members of an enum (with its name in front), fields of core types, keys of ``node.meta`` and ops. Docstrings, sentences
and local variables do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .parsed import nodes

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "feature_names.txt"


@dataclass(frozen=True)
class Feature:
    """``home``: the module that has ``OWNS``. ``inside``: the folders and files of the feature, from the root."""

    home: str
    inside: tuple[str, ...]

    @property
    def owns(self) -> frozenset[str]:
        """The identifiers of the feature: plain ones, and members of an enum with its name in front."""
        return frozenset(import_module(self.home).OWNS)

    def has(self, path: str) -> bool:
        """Whether a file is part of the feature."""
        return any(path == each or path.startswith(f"{each}/") for each in self.inside)


FEATURES = {
    "micro_batches": Feature("spmd.micro_batches", ("spmd/micro_batches",)),
    "same_bits": Feature(
        "spmd.micro_batches.same_bits",
        ("spmd/micro_batches/same_bits.py", "spmd/micro_batches/spread.py", "spmd/micro_batches/side_by_side.py"),
    ),
    "stages": Feature("spmd.stages", ("spmd/stages",)),
    "deferral": Feature("spmd.deferral", ("spmd/deferral",)),
    "experts": Feature("spmd.partitioner.experts", ("spmd/partitioner/experts",)),
}


def sources() -> Iterator[tuple[str, Sequence[ast.AST]]]:
    """The nodes of every file of both packages, by its path from the root."""
    for package in ("passes", "spmd"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), nodes(path)


def identifiers(path: str, file_nodes: Sequence[ast.AST]) -> set[str]:
    """Modules and names that a file imports, attributes, keywords and keys of dicts that it reads or writes."""
    found: set[str] = set()
    for node in file_nodes:
        match node:
            case ast.Import():
                found |= {each.name for each in node.names}
            case ast.ImportFrom():
                module = _module(path, node)
                found |= {module, module.rpartition(".")[2]}
                found |= {name for each in node.names for name in (each.name, f"{module}.{each.name}")}
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                found |= {name, f"{owner}.{name}"}
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.Subscript(slice=ast.Constant(value=name)):
                found.add(str(name))
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]):
                found.add(name)
    return found


def _module(path: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that is imported from."""
    if not node.level:
        return node.module or ""
    folder = Path(path).parts[: -node.level]
    return ".".join([*folder, *([node.module] if node.module else [])])


def defined(file_nodes: Sequence[ast.AST]) -> set[str]:
    """Names that a file defines: functions, classes, arguments, fields and members, and texts, such as keys of meta."""
    found: set[str] = set()
    for node in file_nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Constant(value=str(name)):
                found.add(name)
    return found


def recorded(feature: str) -> list[str]:
    """The files that may name a feature. The list may only become shorter."""
    return [path for name, path in map(str.split, RECORD.read_text().splitlines()) if name == feature]


def files_that_name(feature: Feature, named: dict[str, set[str]]) -> list[str]:
    """The files outside of a feature that name it; ``named``: what each file names."""
    folder = feature.inside[0].removesuffix(".py").replace("/", ".")
    return [
        path
        for path, names in named.items()
        if not feature.has(path)
        and (names & feature.owns or any(each == folder or each.startswith(f"{folder}.") for each in names))
    ]
