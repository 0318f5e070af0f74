"""Remove views and copies that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ..analysis.aliases import escaping, storages
from ..analysis.strides import Layouts, overlaps
from ..base import Pass
from ..ir.edit import stand_in
from ..ir.ops import Trait, listed
from ..ir.program import Program

aten = torch.ops.aten

_RESHAPES = listed(Trait.RESHAPES)
_VIEWS = listed(Trait.RESHAPES, Trait.PERMUTES, Trait.SQUEEZES, Trait.EXPANDS) | {aten.slice.Tensor}


@dataclass(frozen=True)
class FoldViews(Pass):
    """A view that is equal to a tensor that it is a view of becomes that tensor; a view of a view becomes one view.

    The first covers a view to the same shape and chains that undo themselves, such as ``t(t(x))``: shape, strides,
    offset and placement are those of a tensor further up. (Placement, because tensors that are equal on this rank may
    be small shards of different ones, and ranks must agree on what is equal.) A ``_to_copy`` that changes neither
    dtype, device nor layout goes too, unless its memory lives on after the call: an output must not come to share
    memory with an input or with another output. ``clone`` stays. Assumes a functional graph. The rest of a folded chain
    is left to ``DeadCode``.
    """

    def rewrite(self, program: Program) -> int:
        """Visit nodes in order, so that a chain is folded from its start."""
        kept, layouts = escaping(program.graph, storages(program.graph)), Layouts(program.graph)
        edits = 0
        for node in program.graph.nodes:
            if node.target is aten._to_copy.default:
                edits += _drop_copy(node, kept, layouts)
            if node.target in _VIEWS and node.users:
                edits += _fold(node, kept, layouts)
        return edits


def _drop_copy(node: fx.Node, kept: set[fx.Node], layouts: Layouts) -> int:
    source = node.args[0]
    if node in kept or not isinstance(source, fx.Node) or not _is_equal(source, node, layouts):
        return 0  # whatever the offset of the source, which is another one on each rank where it is a slice
    stand_in(node, source)
    return 1


def _fold(node: fx.Node, kept: set[fx.Node], layouts: Layouts) -> int:
    start = next((above for above in _above(node, layouts) if _is_equal_view(above, node, layouts)), None)
    if start is not None:
        stand_in(node, start)
        return 1
    source = node.args[0]
    if isinstance(source, fx.Node) and node.target in _RESHAPES and source.target in _RESHAPES:
        return _shorten(node, source, kept, layouts)
    return 0


def _shorten(node: fx.Node, source: fx.Node, kept: set[fx.Node], layouts: Layouts) -> int:
    """One view instead of two. Where the first one copies, the one must copy too, unless the copy has other readers."""
    may_copy = source.target is aten.reshape.default
    if not layouts.is_contiguous(source.args[0]) and (not may_copy or len(source.users) > 1 or node in kept):
        return 0
    if may_copy:
        node.target = aten.reshape.default
    node.update_arg(0, source.args[0])
    return 1


def _above(node: fx.Node, layouts: Layouts) -> Iterator[fx.Node]:
    """The tensors that ``node`` is a view of, nearest first; strides say nothing across a reshape that copies.

    Nor does the offset of a view whose place is a number that each call reads.
    """
    while node.target in _VIEWS and isinstance(node.args[0], fx.Node):
        copies = node.target is aten.reshape.default and not layouts.is_contiguous(node.args[0])
        if copies or len(node.all_input_nodes) > 1:
            return
        node = node.args[0]
        yield node


def _is_equal_view(one: fx.Node, other: fx.Node, layouts: Layouts) -> bool:
    same_offset = one.meta["val"].storage_offset() == other.meta["val"].storage_offset()
    return bool(same_offset) and _is_equal(one, other, layouts)


def _is_equal(one: fx.Node, other: fx.Node, layouts: Layouts) -> bool:
    if not layouts.have_same_layout(one, other) or overlaps(one.meta["val"]):
        return False
    return bool(one.meta.get("placement") == other.meta.get("placement"))
