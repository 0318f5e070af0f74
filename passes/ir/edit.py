"""Insert nodes and replace nodes. What the meta of the old node says is carried over by the table in ``meta.py``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from .meta import Relation, carried
from .program import Input, Program
from .schemas import name_of


def insert_before(
    position: fx.Node,
    op: Any,
    *args: Any,
    like: fx.Node | None,
    relation: Relation = Relation.HELPER,
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
    val: Any = None,
) -> fx.Node:
    """A new call of ``op`` right before ``position``, with what is carried from ``like`` to a node of this relation.

    Its name is the one that tracing would give it (``cat``, not ``cat_default``), unless ``name`` is another. Without
    ``val`` the runner infers it after the pass. ``like=None``: the node belongs to no part of the step.
    """
    with position.graph.inserting_before(position):
        node = position.graph.create_node("call_function", op, args, dict(kwargs or {}), name=name or name_of(op))
    node.meta = carried(like, relation) if like is not None else {}
    if val is not None:
        node.meta["val"] = val
    return node


def stand_in(old: fx.Node, new: fx.Node) -> None:
    """Let all readers of ``old`` read ``new``, a node with meta of its own that has the same value: a gradient too."""
    if "grad_of" in old.meta:
        new.meta.setdefault("grad_of", old.meta["grad_of"])
    old.replace_all_uses_with(new)


def replace(old: fx.Node, new: fx.Node, val: Any = None) -> None:
    """Let all readers of ``old`` read ``new``, which has the same value: carry over what is known of it.

    ``val`` is that of ``new`` if it has none yet; without it the runner infers it. ``old`` stays in the graph.
    """
    new.meta |= carried(old, Relation.REPLACEMENT)
    if val is not None:
        new.meta["val"] = val
    old.replace_all_uses_with(new)


def add_input(program: Program, declared: Input, val: Any) -> fx.Node:
    """A new input, behind all others."""
    last = program.placeholders[-1]
    with program.graph.inserting_after(last):
        node = program.graph.placeholder(re.sub(r"\W", "_", declared.name))
    node.meta["val"] = val
    program.inputs = [*program.inputs, declared]
    return node
