"""The syntax trees of source files, parsed once in a process: all files of both packages take two seconds."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, which no test changes."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, in the order of ``ast.walk``."""
    return tuple(ast.walk(parsed(path)))
