"""The table of meta keys against the code: each access is of a declared key, in a file that its entry names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import passes
from passes.ir.meta import DECLARED, KEYS, TORCH_KEYS, Key, is_declared

ROOT = Path(passes.__file__).parent.parent
SOURCES = [path for package in ("passes", "spmd") for path in sorted((ROOT / package).rglob("*.py"))]


def accesses(path: Path) -> set[tuple[str, str]]:
    """(key, "write" or "read") for each ``meta["key"]``, ``meta.get("key")``, ``"key" in node.meta`` and their like."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and is_meta(node.value) and isinstance(node.slice, ast.Constant):
            found.add((str(node.slice.value), "read" if isinstance(node.ctx, ast.Load) else "write"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_meta(node.func.value):
            if node.func.attr in ("get", "pop", "setdefault") and isinstance(node.args[0], ast.Constant):
                found.add((str(node.args[0].value), "read" if node.func.attr == "get" else "write"))
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and is_meta(node.comparators[0]):
            found.add((str(node.left.value), "read"))
    return found


def is_meta(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "meta"


def lies_in(path: Path, folders: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(ROOT / folder) for folder in folders)


def test_each_name_is_declared_once() -> None:
    assert len(DECLARED) == len(KEYS) + len(TORCH_KEYS)
    assert all(is_declared(name) for name in (*DECLARED, "mypackage.cost")) and not is_declared("cost")


def test_each_access_is_declared() -> None:
    """Else add the file, or its folder, to the readers or writers of the key in ``passes/ir/meta.py``."""
    undeclared = [
        f"{path.relative_to(ROOT)}: {how} {name}"
        for path in SOURCES
        for name, how in sorted(accesses(path))
        if name != "val" and not lies_in(path, DECLARED[name].readers if how == "read" else DECLARED[name].writers)
    ]
    assert not undeclared


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_each_writer_and_reader_names_the_key(key: Key) -> None:
    for place in (*key.writers, *key.readers):
        files = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
        assert any(re.search(f"[\"']{key.name}[\"']", file.read_text()) for file in files), f"nothing of {place}"
