"""Say some ops in other words that mean the same and can write where they are told: the first step of ReuseMemory."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..analysis.aliases import is_view
from ..analysis.out_variants import FILLS, out_variant
from ..analysis.strides import Layouts
from ..ir.edit import insert_before
from ..ir.meta import Relation

aten = torch.ops.aten


def make_writable(graph: fx.Graph) -> None:
    """Change the nodes, to the same bits and strides.

    A lookup becomes the selection of rows that it is; a reshape becomes a view, of a copy where it needs one; what is
    filled in the likeness of a tensor no longer reads that tensor; and what will lie in a place is as contiguous as its
    ``val`` says.
    """
    layouts = Layouts(graph)
    for node in list(graph.nodes):
        if node.target is aten.embedding.default:
            _select_rows(node, layouts)
        elif node.target is aten.reshape.default:
            _view(node, layouts)
        elif node.target is aten.relu.default:
            node.target, node.args = aten.clamp_min.default, (node.args[0], 0)  # which torch's own does
        elif node.target is aten.contiguous.default:
            _drop_copy(node, layouts)
        elif node.target in FILLS and node.all_input_nodes:
            _fill(node, layouts)


def _select_rows(node: fx.Node, layouts: Layouts) -> None:
    table, rows = node.args[:2]
    val: torch.Tensor = node.meta["val"]
    if val.device.type != "cpu" or not isinstance(rows, fx.Node) or not isinstance(table, fx.Node):
        return
    if not layouts.is_contiguous(rows) or not _is_laid_out_as_told(rows):
        return
    flat = _add(node, aten.view.default, (rows, [-1]), rows.meta["val"].reshape(-1))
    shape = (rows.meta["val"].numel(), table.meta["val"].shape[1])
    picked = _add(node, aten.index_select.default, (table, 0, flat), val.reshape(shape))
    node.target, node.args, node.kwargs = aten.view.default, (picked, list(val.shape)), {}


def _view(node: fx.Node, layouts: Layouts) -> None:
    """The reshape of what is not laid out for it copies; the view of a copy that is made beforehand does not.

    Where some ranks may have to copy and others not, it stays a reshape.
    """
    source, val = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    if not layouts.is_known(source):
        return
    if not layouts.is_viewable(source, val.shape):
        copy = source.meta["val"].clone(memory_format=torch.contiguous_format)
        options = {"memory_format": torch.contiguous_format}
        source = _add(node, aten.clone.default, (source,), copy, options)
    if _is_laid_out_as_told(source):
        node.target, node.args, node.kwargs = aten.view.default, (source, list(val.shape)), {}


def _is_laid_out_as_told(node: fx.Node) -> bool:
    """Whether ``val`` surely has the strides. What a kernel allocates may be laid out otherwise than a fake."""
    return _shown(node).op == "placeholder" or _is_made_as_told(node)


def _is_made_as_told(node: fx.Node) -> bool:
    """The same of what is, or shows, a value that will have a place."""
    return out_variant(_shown(node)) is not None


def _shown(node: fx.Node) -> fx.Node:
    """What a view shows."""
    while is_view(node) and node.target is not operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _drop_copy(node: fx.Node, layouts: Layouts) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if _is_made_as_told(source) and layouts.is_contiguous(source):
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _fill(node: fx.Node, layouts: Layouts) -> None:
    position, value = FILLS[node.target]
    val: torch.Tensor = node.meta["val"]
    number = value if position is None else node.args[position]
    if layouts.is_contiguous(node) and not isinstance(number, fx.Node):
        node.target, node.args = aten.full.default, (list(val.shape), number)
        node.kwargs = {"dtype": val.dtype, "device": val.device}


def _add(node: fx.Node, op: Any, args: tuple[Any, ...], val: Any, kwargs: dict[str, Any] | None = None) -> fx.Node:
    return insert_before(node, op, *args, like=node, relation=Relation.STEP, kwargs=kwargs, val=val)
