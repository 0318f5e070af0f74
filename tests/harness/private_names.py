"""Private torch names in a package: imported or read outside of its ``_torch.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from .parsed import nodes

# Ops are public by their schemas, those called ``_softmax`` too.
_OPS = ("aten", "prims", "torch.ops.aten", "torch.ops.prims")


def private_torch_names(package: Path) -> list[str]:
    """``"file.py:12: module._parameters"`` for each private torch name that a file other than ``_torch.py`` uses."""
    files = sorted(path for path in package.rglob("*.py") if path.name != "_torch.py")
    return [f"{path.relative_to(package)}:{line}" for path in files for line in _in_file(nodes(path))]


def _in_file(tree: Sequence[ast.AST]) -> Iterator[str]:
    own = _defined_in(tree)
    for node in tree:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(map(_is_private_import, _imported(node))):
            yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            if ast.unparse(node.value) not in (*_OPS, "sys"):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in _ATTRIBUTES:
            yield f"{node.lineno}: {node.value!r}"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The full names that an import statement binds, without those of a relative one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


def _is_private_import(name: str) -> bool:
    root, *rest = name.split(".")
    return root == "torch" and any(map(_is_private, rest))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined_in(tree: Sequence[ast.AST]) -> set[str]:
    """The names of functions, classes, fields and attributes that a file itself defines."""
    found = set()
    for node in tree:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _private_attributes() -> frozenset[str]:
    """Private attributes of torch's objects, which ``getattr`` or ``attrgetter`` could reach by a string."""
    parameter = nn.Parameter(torch.zeros(1))
    objects = (nn.Module(), parameter, torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu"))
    names = {name for each in objects for name in (*dir(each), *vars(each))}
    return frozenset(name for name in names if _is_private(name) and not hasattr(torch.ops.aten, name))


_ATTRIBUTES = _private_attributes()
