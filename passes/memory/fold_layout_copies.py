"""Make a value in the layout that its only reader wants, where a copy would bring it there: a step of ReuseMemory.

The gradients of query, key and value are stacked, turned and copied, so that the next product can read them: a stack
that is told where to write can as well write there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..analysis.aliases import escaping, storages
from ..analysis.out_variants import out_variant
from ..analysis.strides import Layouts

aten = torch.ops.aten

_COPYING: set[Any] = {aten.cat.default, aten.stack.default}  # the same bits in any layout, and torch's own out variant
_TURNING: set[Any] = {aten.permute.default, aten.t.default, aten.transpose.int}


def lay_out(graph: fx.Graph) -> None:
    """Drop each contiguous copy of a turned stack or concatenation that nobody else reads.

    What lives on after the call gets no place, so its op does not ask where to write.
    """
    layouts, kept = Layouts(graph), escaping(graph, storages(graph))
    for copy in graph.find_nodes(op="call_function", target=aten.clone.default):
        turns = _turns(copy)
        if turns and copy not in kept and layouts.is_even(copy) and _is_contiguous_copy(copy, layouts):
            _turn(turns, copy)
            copy.replace_all_uses_with(turns[-1])
            graph.erase_node(copy)


def _turns(copy: fx.Node) -> list[fx.Node]:
    """The value that is copied and what turns it, first to last; nothing if somebody else reads one of them."""
    chain: list[fx.Node] = []
    node = copy.args[0]
    while isinstance(node, fx.Node) and len(node.users) == 1:
        chain.insert(0, node)
        if node.target not in _TURNING:
            return chain if node.target in _COPYING and out_variant(node) is not None and len(chain) > 1 else []
        node = node.args[0]
    return []


def _is_contiguous_copy(copy: fx.Node, layouts: Layouts) -> bool:
    source: Any = copy.args[0]
    return layouts.is_contiguous(copy) and source.meta["val"].dtype is copy.meta["val"].dtype


def _turn(turns: list[fx.Node], copy: fx.Node) -> None:
    """Give the first of ``turns`` the strides with which the last one is laid out as ``copy``."""
    made, *views = turns
    val: torch.Tensor = made.meta["val"]
    numbered = torch.empty([1] * val.ndim, device="meta").as_strided([1] * val.ndim, list(range(val.ndim)))
    for view in views:
        turn: Any = view.target
        numbered = turn(numbered, *view.args[1:])
    strides = [0] * val.ndim
    for stride, dim in zip(copy.meta["val"].stride(), numbered.stride(), strict=True):
        strides[dim] = stride
    made.meta["val"] = val.new_empty_strided(val.shape, strides)
    for view, source in zip(views, turns, strict=False):
        turn = view.target
        view.meta["val"] = turn(source.meta["val"], *view.args[1:])
