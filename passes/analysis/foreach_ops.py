"""Ops over lists of tensors (``_foreach_mul``, ``_fused_adamw``), entry by entry, and their in-place variants.

A functional op over lists returns a list for each list that its in-place variant writes to, in the same order; an op
that returns one list returns it bare. An entry is a ``getitem`` of such a list.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..ir.edit import insert_before, replace
from ..ir.meta import Relation
from ..ir.ops import find
from ..ir.roles import Phase
from ..ir.schemas import schema

aten = torch.ops.aten

_PREFIXES = ("_foreach_", "_fused_")


@dataclass(frozen=True)
class Entry:
    """One result of ``op``: entry ``index`` of what becomes of the op's argument ``argument``."""

    op: fx.Node
    argument: int
    index: int

    @property
    def source(self) -> Any:
        """The value that the in-place variant overwrites with this result."""
        return self.op.args[self.argument][self.index]  # type: ignore[index]


def entry_of(node: fx.Node) -> Entry | None:
    """The entry of a list op's results that ``node`` takes; None if it takes none."""
    if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
        return None
    results, index = node.args[0], node.args[1]
    written = _written(results)
    if len(written) == 1:
        return Entry(results, written[0], index)  # type: ignore[arg-type]
    if results.target is not operator.getitem or not isinstance(results.args[0], fx.Node):
        return None
    written = _written(results.args[0])
    return Entry(results.args[0], written[results.args[1]], index) if written else None  # type: ignore[index, arg-type]


def is_read_by_entries(op: fx.Node) -> bool:
    """Whether the readers of an op over lists read entries, and none of them a list as a whole."""
    lists = [op] if len(_written(op)) == 1 else list(op.users)
    return all(user.target is operator.getitem for user in op.users) and all(
        user.target is operator.getitem for each in lists for user in each.users
    )


def entries_by_op(graph: fx.Graph) -> dict[fx.Node, list[tuple[fx.Node, Entry]]]:
    """The ops over lists in the order of the graph, each with its entries: a node, and which entry it is."""
    found: dict[fx.Node, list[tuple[fx.Node, Entry]]] = {}
    for node in graph.nodes:
        if (entry := entry_of(node)) is not None:
            found.setdefault(entry.op, []).append((node, entry))
    return found


def write_lists_in_place(graph: fx.Graph, overwriting: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Replace ops over lists by their in-place variants; returns what each entry became.

    The entries in ``overwriting`` may write where their sources lie, all others write to clones. An op none of whose
    entries may stays as it is, unless it would clone all of its arguments.
    """
    became: dict[fx.Node, fx.Node] = {}
    for op, those in entries_by_op(graph).items():
        if _clones_all(op) or any(node in overwriting for node, _ in those):
            became |= _write_in_place(op, those, overwriting)
    return became


def replace_by_entries(old: list[fx.Node], results: fx.Node, start: fx.Node) -> list[fx.Node]:
    """Let readers of the old nodes read the entries of a list of results instead."""
    entries = [call_before(start, operator.getitem, (results, k)) for k in range(len(old))]
    for node, entry in zip(old, entries, strict=True):
        replace(node, entry, node.meta["val"])
    return entries


def call_before(start: fx.Node, op: Any, args: tuple[Any, ...], options: dict[str, Any] | None = None) -> fx.Node:
    """A new node of the update before ``start``; it serves several parameters, so it belongs to no module."""
    node = insert_before(start, op, *args, like=None, kwargs=options)
    node.meta["phase"] = Phase.UPDATE
    return node


def list_before(
    start: fx.Node, op: Any, args: tuple[Any, ...], like: list[fx.Node], options: dict[str, Any] | None = None
) -> fx.Node:
    """A new op over lists before ``start``, whose results are as those of ``like``, entry by entry."""
    results = call_before(start, op, args, options)
    results.meta["val"] = [node.meta["val"] for node in like]
    return results


def _write_in_place(
    op: fx.Node, entries: list[tuple[fx.Node, Entry]], overwriting: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    spared = {(entry.argument, entry.index) for node, entry in entries if node in overwriting}
    for argument in _written(op):
        if argument not in only_read(op):
            values = [
                value if (argument, k) in spared else _clone(value, op)
                for k, value in enumerate(op.args[argument])  # type: ignore[arg-type]
            ]
            op.update_arg(argument, values)
    became = {node: entry.source for node, entry in entries}
    for node, source in became.items():
        node.replace_all_uses_with(source)
    erase_results(op)
    op.target, op.meta["val"] = _in_place(op), None
    return became


def erase_results(node: fx.Node) -> None:
    """Erase the ``getitem``s of an op that nobody reads any more."""
    for user in list(node.users):
        erase_results(user)
        node.graph.erase_node(user)


def _clone(node: fx.Node, before: fx.Node) -> fx.Node:
    return insert_before(
        before, aten.clone.default, node, like=node, relation=Relation.REPLACEMENT, val=node.meta["val"]
    )


def _in_place(node: fx.Node) -> Any:
    """The op that writes the results over the arguments; None if there is none, or if ``node`` is no op over lists."""
    op: Any = node.target
    if not is_over_lists(op):
        return None
    return find(f"{schema(op).name}_.{schema(op).overload}")


def _written(node: fx.Node) -> list[int]:
    """The positions of the lists that the in-place variant writes to."""
    variant = _in_place(node)
    return [] if variant is None else schema(variant).written


def _clones_all(node: fx.Node) -> bool:
    """Whether the functional op runs its in-place variant on clones."""
    return schema(node.target).name.startswith("_fused_")


def is_over_lists(op: Any) -> bool:
    """Whether an op, functional or in place, computes entry by entry of lists of tensors."""
    return isinstance(op, OpOverload) and op.namespace == "aten" and schema(op).name.startswith(_PREFIXES)


def only_read(node: fx.Node) -> set[int]:
    """Positions of lists that the in-place variant only declares to write: gradients that need no unscaling, counts."""
    if not isinstance(node.target, OpOverload) or not _clones_all(node) or node.kwargs.get("grad_scale") is not None:
        return set()
    names = schema(node.target).names
    if "grads" not in names:
        return set()
    return {names.index("grads")} | ({names.index("state_steps")} if "state_steps" in names else set())
