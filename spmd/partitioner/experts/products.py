"""Grouped products: which of their operands have rows sorted by expert, and which says where each expert's rows end."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from passes.ir.schemas import name_of

_PRODUCTS = {"_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"}
# By the numbers of dims of the two factors: the dim of each that has rows.
_RAGGED: dict[tuple[int, int], list[int | None]] = {(2, 3): [0], (3, 2): [None, 1], (2, 2): [1, 0]}


def is_grouped(node: fx.Node) -> bool:
    """Whether a node multiplies rows that are sorted by group; not so of two factors of three dims."""
    return node.op == "call_function" and name_of(node.target) in _PRODUCTS and len(node.all_input_nodes) > 2


def ends_of(product: fx.Node) -> fx.Node:
    """The node that holds where the rows of each expert end."""
    return [arg for arg in product.args if isinstance(arg, fx.Node)][2]


def rows_of(product: fx.Node) -> list[tuple[fx.Node, int]]:
    """The operands that have rows of experts, and the dim of these."""
    first, second, _, *others = (arg for arg in product.args if isinstance(arg, fx.Node))
    dims = _RAGGED[first.meta["val"].ndim, second.meta["val"].ndim]
    ragged = [(each, dim) for each, dim in zip((first, second), dims, strict=False) if dim is not None]
    return ragged + [(each, 0) for each in others]


def base(node: Any, through: Collection[str]) -> Any:
    """The node of which ``node`` is a view or a copy, by ops of these names."""
    while isinstance(node, fx.Node) and node.op == "call_function" and name_of(node.target) in through:
        node = node.args[0]
    return node
