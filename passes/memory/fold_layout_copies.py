"""Fold a copy that changes a layout into the stack or concatenation that is copied.

The gradients of query, key and value are stacked, permuted and copied, so that the next product can read them. A stack
that writes into planned memory can as well write there in the layout of the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.aliases import escaping, storages
from ..analysis.out_variants import out_variant
from ..analysis.strides import Layouts
from ..base import Pass
from ..ir.ops import Trait, has
from ..ir.program import Program
from .canonicalize import Canonicalize

aten = torch.ops.aten


@dataclass(frozen=True)
class FoldLayoutCopies(Pass):
    """A stack or concatenation that is permuted and then copied takes over the layout of the copy.

    Its ``val`` gets the strides with which the copied permutation is contiguous, and the copy becomes ``contiguous``.
    ``ReuseMemory`` lets the op write in that layout and drops the ``contiguous``, which copies where that pass does not
    follow. Only where the op has no other reader and the copy dies within the call, as what lives on is not in planned
    memory. Values and the order of nodes stay the same.
    """

    last: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True
    after: ClassVar[tuple[type[Pass], ...]] = (Canonicalize,)

    def rewrite(self, program: Program) -> int:
        """Fold copy by copy."""
        layouts, kept = Layouts(program.graph), escaping(program.graph, storages(program.graph))
        edits = 0
        for copy in program.graph.find_nodes(op="call_function", target=aten.clone.default):
            chain = _permuted(copy)
            if chain and copy not in kept and layouts.is_even(copy) and _is_contiguous_copy(copy, layouts):
                _lay_out(chain, copy)
                copy.target, copy.args, copy.kwargs = aten.contiguous.default, (chain[-1],), {}
                edits += 1
        return edits


def _permuted(copy: fx.Node) -> list[fx.Node]:
    """The concatenation that is copied, and its permutations in order; nothing if one of them has another reader."""
    chain: list[fx.Node] = []
    node = copy.args[0]
    while isinstance(node, fx.Node) and len(node.users) == 1:
        chain.insert(0, node)
        if not has(node.target, Trait.PERMUTES):
            joins = has(node.target, Trait.JOINS)  # the same bits in any layout, and an out variant
            return chain if joins and out_variant(node) is not None and len(chain) > 1 else []
        node = node.args[0]
    return []


def _is_contiguous_copy(copy: fx.Node, layouts: Layouts) -> bool:
    source: Any = copy.args[0]
    return layouts.is_contiguous(copy) and source.meta["val"].dtype is copy.meta["val"].dtype


def _lay_out(chain: list[fx.Node], copy: fx.Node) -> None:
    """Give the first of ``chain`` the strides with which the last one is laid out as ``copy``."""
    made, *views = chain
    val: torch.Tensor = made.meta["val"]
    numbered = torch.empty([1] * val.ndim, device="meta").as_strided([1] * val.ndim, list(range(val.ndim)))
    strides = [0] * val.ndim
    for stride, dim in zip(copy.meta["val"].stride(), _permute(views, numbered)[-1].stride(), strict=True):
        strides[dim] = stride
    made.meta["val"] = val.new_empty_strided(val.shape, strides)
    for view, permuted in zip(views, _permute(views, made.meta["val"]), strict=True):
        view.meta["val"] = permuted


def _permute(views: list[fx.Node], tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor`` after each of the permutations."""
    permuted: list[torch.Tensor] = []
    for view in views:
        op: Any = view.target
        tensor = op(tensor, *view.args[1:])
        permuted.append(tensor)
    return permuted
