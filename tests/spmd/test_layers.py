"""The direction of imports, where private torch names may be used, and which names are public."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import spmd
from tests.harness.private_names import private_torch_names

PACKAGE = Path(spmd.__file__).parent
# Files and folders of spmd, in the order of imports; those of one line may import each other.
LAYERS = (
    {"_torch", "placements", "source_lines"},
    {"ranks"},
    {"call"},
    {"rules"},
    {"capture"},
    {"guards"},
    {"partitioner"},
    {"modes"},
    {"runtime"},
    {"override", "dump", "options", "compiled", "dispatch", "step"},
    {"__init__"},
    {"cli", "__main__"},
)


def imports(path: Path) -> Iterator[str]:
    """The files and folders of spmd that a file imports."""
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [*folder[: len(folder) + 1 - node.level], *(node.module or "").split(".")]
            yield from [parts[0]] if parts[0] else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "spmd":
            yield from (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]


def layer(name: str) -> int:
    """The index of a file or folder; other names are public ones, of ``__init__``."""
    found = [index for index, names in enumerate(LAYERS) if name in names]
    return found[0] if found else LAYERS.index({"__init__"})


def test_imports_go_one_way() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in imports(path)
        if layer(name) > layer(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
    ]
    assert upward == []


def test_private_torch_names_are_in_one_file() -> None:
    """Private names go behind accessors in ``spmd/_torch.py``, each with why and the torch versions it was seen in."""
    assert private_torch_names(PACKAGE) == []


def test_public_names_are_there() -> None:
    assert sorted(spmd.__all__) == sorted(set(spmd.__all__))
    assert all(hasattr(spmd, name) for name in spmd.__all__)
