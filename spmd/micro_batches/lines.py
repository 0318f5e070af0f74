"""An op in an error: its name, its module, and the user's line."""

from __future__ import annotations

from torch import fx

from passes.ir.schemas import name_of


def described(node: fx.Node) -> str:
    """``sum at model.1 (train.py:7: ...)``; for what has no line, such as a gathered argument, that of a reader."""
    op = name_of(node.target) if node.op == "call_function" else node.name
    at = f" at {node.meta['module']}" if node.meta.get("module") else ""
    while not node.meta.get("source") and node.users:
        node = next(iter(node.users))
    line = f" ({node.meta['source']})" if node.meta.get("source") else ""
    return f"{op}{at}{line}"
