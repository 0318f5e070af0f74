"""The direction of imports, and where private torch names may be used."""

from __future__ import annotations

import ast
from pathlib import Path

import passes
from tests.harness.private_names import private_torch_names

FILES = sorted(Path(passes.__file__).parent.rglob("*.py"))


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}


def test_passes_do_not_import_spmd() -> None:
    assert not [path for path in FILES if any(name.split(".")[0] == "spmd" for name in imported(path))]


def test_private_torch_names_are_in_one_file() -> None:
    """Private names go behind accessors in ``passes/_torch.py``, each with the reason for it."""
    assert private_torch_names(Path(passes.__file__).parent) == []


def test_public_names_are_there() -> None:
    assert sorted(passes.__all__) == sorted(set(passes.__all__))
    assert all(hasattr(passes, name) for name in passes.__all__)


def test_passes_ask_for_strides_in_one_file() -> None:
    """Elsewhere a decision by this rank's strides would be another one on the next rank."""
    no_decision = {
        "arena.py",  # makes tensors
        "fold_layout_copies.py",  # of what is the same on all ranks
        "buffers.py",  # counts bytes
        "reuse_memory.py",  # says where they lie, which may differ
        "message_collectives.py",  # runs
    }
    asking = {
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("is_contiguous", "stride")
        if not ast.unparse(node.value).endswith("layouts")
    }
    assert asking - no_decision == {"strides.py"}
