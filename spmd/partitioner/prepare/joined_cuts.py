"""Rows that are cut apart and joined again in their order, as by ``torch.cat(list(x))``, are a view of the whole.

Nothing says of a cut by a row's number that it is one of each row, so that a rank would need all rows to cut.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.ir.edit import insert_before
from passes.ir.meta import Relation
from passes.ir.schemas import argument

aten = torch.ops.aten


@dataclass(frozen=True)
class _Cut:
    """The positions of ``dim`` of ``source`` that a node has; ``is_gone``: it has one of them, and not the dim."""

    source: fx.Node
    dim: int
    start: int
    length: int
    is_gone: bool


def view_joined_cuts(program: Program) -> Program:
    """The program with a view for each join of all that one tensor was cut into; ``program`` is left as it is."""
    if not any(_whole(node) for node in program.graph.nodes if node.target in _JOINS):
        return program
    program = program.copy()
    for node in [each for each in program.graph.nodes if each.target in _JOINS]:
        cut = _whole(node)
        if cut is not None:
            node.replace_all_uses_with(_viewed(node, cut.source))
            program.graph.erase_node(node)
    for node in reversed(program.graph.nodes):
        if not node.users and node.target in (*_CUTS, operator.getitem):
            program.graph.erase_node(node)
    return program


def _whole(join: fx.Node) -> _Cut | None:
    """The first of the cuts that a node joins, if they are all of their source, in order, along the dim of the join."""
    operands: Any = join.args[0]
    cuts = [_cut(each) for each in operands]
    first = cuts[0] if len(cuts) > 1 else None
    if first is None or int(argument(join, "dim") or 0) % join.meta["val"].ndim != first.dim:
        return None
    end = 0
    for each in cuts:
        if each is None or each != replace(first, start=end, length=each.length):
            return None
        end += each.length
    return first if end == first.source.meta["val"].shape[first.dim] else None


def _cut(node: Any) -> _Cut | None:
    """The rows that a node cuts out of another one; None if it is no cut."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return _of_list(*node.args)
    if node.target is aten.select.int:
        index = argument(node, "index")
        return _Cut(*_of(node), index % _size(node), 1, is_gone=True) if isinstance(index, int) else None
    if node.target is aten.slice.Tensor and argument(node, "step") in (None, 1):
        start, size = argument(node, "start") or 0, _size(node)
        start = min(max(start + size if start < 0 else start, 0), size)
        source, dim = _of(node)
        return _Cut(source, dim, start, node.meta["val"].shape[dim], is_gone=False)
    return None


def _of_list(cuts: Any, k: Any) -> _Cut | None:
    """The one at ``k`` of several cuts."""
    if cuts.target is aten.unbind.int:
        return _Cut(*_of(cuts), k, 1, is_gone=True)
    if cuts.target not in _LISTS:
        return None
    source, dim = _of(cuts)
    lengths = [each.shape[dim] for each in cuts.meta["val"]]
    return _Cut(source, dim, sum(lengths[:k]), lengths[k], is_gone=False)


def _of(cut: Any) -> tuple[fx.Node, int]:
    """The node that is cut, and the dim along which it is."""
    return cut.args[0], int(argument(cut, "dim") or 0) % int(cut.args[0].meta["val"].ndim)


def _size(cut: fx.Node) -> int:
    source, dim = _of(cut)
    return int(source.meta["val"].shape[dim])


def _viewed(join: fx.Node, source: fx.Node) -> fx.Node:
    """``source`` in the shape of a join of all of it, contiguous as that is."""
    shape = list(join.meta["val"].shape)
    val = source.meta["val"].reshape(shape)
    if not val.is_contiguous():
        kept = {"memory_format": torch.contiguous_format}
        source = insert_before(
            join, aten.clone.default, source, like=join, kwargs=kept, val=source.meta["val"].clone(**kept)
        )
        val = source.meta["val"].reshape(shape)
    return insert_before(join, aten.reshape.default, source, shape, like=join, relation=Relation.REPLACEMENT, val=val)


_JOINS = (aten.cat.default, aten.stack.default)
_LISTS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)
_CUTS = (*_LISTS, aten.select.int, aten.slice.Tensor)
