"""Rewrite ops to equivalents that have an out variant, so that they can write into planned memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..analysis.aliases import is_view
from ..analysis.out_variants import can_be_planned, fill_value
from ..analysis.strides import Layouts
from ..base import Pass
from ..ir.edit import insert_before
from ..ir.meta import Relation
from ..ir.ops import Trait, listed
from ..ir.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class Canonicalize(Pass):
    """An op without an out variant becomes an equivalent that has one, with the same bits and strides.

    An embedding on the CPU becomes an ``index_select``, a ``relu`` a ``clamp_min``, a reshape a view (of a clone, where
    a reshape would copy), and a fill in the shape of a tensor one that does not read that tensor. A ``contiguous`` that
    copies nothing is dropped. Assumes that an op with an out variant lays out its result as ``val`` says: in memory
    that ``ReuseMemory`` plans, it does. Nodes keep their order.
    """

    keeps_order: ClassVar[bool] = True

    def rewrite(self, program: Program) -> int:
        """Visit nodes in order: what an op reads is rewritten before it."""
        layouts = Layouts(program.graph)
        found = [node for node in program.graph.nodes if node.target in _REWRITES]
        return sum(_REWRITES[node.target](node, layouts) for node in found)


def drop_contiguous(node: fx.Node, layouts: Layouts) -> bool:
    """Drop a ``contiguous`` of what is contiguous already, if that is sure."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if not _is_written_as_planned(source, layouts) or not layouts.is_contiguous(source):
        return False
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    return True


def _select_rows(node: fx.Node, layouts: Layouts) -> bool:
    table, rows = node.args[:2]
    val: torch.Tensor = node.meta["val"]
    if val.device.type != "cpu" or not isinstance(rows, fx.Node) or not isinstance(table, fx.Node):
        return False
    if not layouts.is_contiguous(rows) or not _is_laid_out_as_val(rows, layouts):
        return False
    flat = _add(node, aten.view.default, (rows, [-1]), rows.meta["val"].reshape(-1))
    shape = (rows.meta["val"].numel(), table.meta["val"].shape[1])
    picked = _add(node, aten.index_select.default, (table, 0, flat), val.reshape(shape))
    node.target, node.args, node.kwargs = aten.view.default, (picked, list(val.shape)), {}
    return True


def to_view(node: fx.Node, layouts: Layouts) -> bool:
    """A view of what can be viewed in the new shape, else of a clone of it.

    Where some ranks may have to copy and others not, it stays a reshape.
    """
    source, val = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    if not layouts.is_known(source):
        return False
    if not layouts.is_viewable(source, val.shape):
        copy = source.meta["val"].clone(memory_format=torch.contiguous_format)
        options = {"memory_format": torch.contiguous_format}
        source = _add(node, aten.clone.default, (source,), copy, options)
    if not _is_laid_out_as_val(source, layouts):
        return False
    node.target, node.args, node.kwargs = aten.view.default, (source, list(val.shape)), {}
    return True


def _clamp(node: fx.Node, layouts: Layouts) -> bool:
    node.target, node.args = aten.clamp_min.default, (node.args[0], 0)  # torch's own relu does the same
    return True


def _fill(node: fx.Node, layouts: Layouts) -> bool:
    number, val = fill_value(node), node.meta["val"]
    if not node.all_input_nodes or isinstance(number, fx.Node) or not layouts.is_contiguous(node):
        return False
    node.target, node.args = aten.full.default, (list(val.shape), number)
    node.kwargs = {"dtype": val.dtype, "device": val.device}
    return True


_REWRITES: dict[Any, Callable[[fx.Node, Layouts], bool]] = {
    aten.embedding.default: _select_rows,
    aten.reshape.default: to_view,
    aten.relu.default: _clamp,
    aten.contiguous.default: drop_contiguous,
    **dict.fromkeys(listed(Trait.ZEROS, Trait.ONES, Trait.FULL), _fill),
}


def _is_laid_out_as_val(node: fx.Node, layouts: Layouts) -> bool:
    """Whether ``val`` surely has the strides. What a kernel allocates may be laid out otherwise than a fake."""
    return _base(node).op == "placeholder" or _is_written_as_planned(node, layouts)


def _is_written_as_planned(node: fx.Node, layouts: Layouts) -> bool:
    """Whether ``node`` is, or is a view of, a value that can be written into planned memory."""
    return can_be_planned(_base(node), layouts)


def _base(node: fx.Node) -> fx.Node:
    """The value that a chain of views starts from."""
    while is_view(node) and node.target is not operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _add(node: fx.Node, op: Any, args: tuple[Any, ...], val: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
    return insert_before(node, op, *args, like=node, relation=Relation.STEP, kwargs=kwargs, val=val)
