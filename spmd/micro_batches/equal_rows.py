"""Compute what is equal in all rows for the rows of one part, instead of for all rows, to cut a part out of.

The first state of an LSTM is filled with zeros, so that nothing says how to split it: a rank would compute the first
step of all its rows in each run, and take those of the part by its position.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from passes import Program
from passes.ir.edit import insert_before
from passes.ir.ops import Trait, has
from passes.ir.schemas import argument

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default)
_CUTS = (aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default)
_VIEWS = (Trait.RESHAPES, Trait.PERMUTES, Trait.SQUEEZES, Trait.EXPANDS, Trait.CUTS)  # which keep the number
_FILLS = (Trait.ZEROS, Trait.ONES, Trait.FULL)


def compute_equal_rows_in_part(program: Program) -> None:
    """Replace slices of values that are equal along their dim; nodes that nothing reads any more are erased."""
    slices = program.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    found = [node for node in slices if _are_equal(node.all_input_nodes[0], _dim(node))]
    for node in found:
        part = _narrowed(node.all_input_nodes[0], _dim(node), node.meta["val"].shape[_dim(node)], node)
        part.meta |= {key: node.meta[key] for key in ("placement", "captured", "grad_of") if key in node.meta}
        node.replace_all_uses_with(part)
    for node in reversed(program.graph.nodes if found else ()):
        if not node.users and has(node.target, Trait.PURE):
            program.graph.erase_node(node)


def _dim(cut: fx.Node) -> int:
    return int(argument(cut, "dim")) % int(cut.all_input_nodes[0].meta["val"].ndim)


def _are_equal(value: Any, dim: int) -> bool:
    """Whether a value surely is the same at all positions along a dim."""
    if _fill(value) is not None:
        return True
    if source := _cut(value):
        return _are_equal(source, dim)
    if value.target in _PRODUCTS:
        *added, rows, _ = value.args
        return dim == 0 and all(each.meta["val"].ndim == 1 for each in added) and _are_equal(rows, 0)
    is_pointwise = has(value.target, Trait.POINTWISE) and not has(value.target, Trait.RANDOM)
    given = value.all_input_nodes if is_pointwise else []
    pairs = [(each, dim - _lacking(value, each)) for each in given if not _is_repeated(each, value, dim)]
    return bool(pairs) and all(_are_equal(each, at) for each, at in pairs)


def _cut(value: fx.Node) -> fx.Node | None:
    """What a slice, or an element of a split, is cut out of."""
    if value.target is operator.getitem:
        value = value.all_input_nodes[0]
    return value.all_input_nodes[0] if value.target in _CUTS else None


def _fill(value: fx.Node) -> fx.Node | None:
    """The fill that a value is, or is a view of."""
    while has(value.target, *_VIEWS) or (
        value.target is operator.getitem and has(value.all_input_nodes[0].target, Trait.CUTS)
    ):
        value = value.all_input_nodes[0]
    return value if has(value.target, *_FILLS) else None


def _is_repeated(operand: fx.Node, result: fx.Node, dim: int) -> bool:
    """Whether an operand of an elementwise op has no more than one position along a dim of its result."""
    val, at = operand.meta["val"], dim - result.meta["val"].ndim
    return not isinstance(val, torch.Tensor) or val.ndim < -at or val.shape[at] == 1


def _narrowed(value: Any, dim: int, length: int, before: fx.Node) -> fx.Node:
    """The first positions along ``dim`` of a value for which ``_are_equal`` holds, computed for these alone."""
    val = value.meta["val"].narrow(dim, 0, length).clone(memory_format=torch.contiguous_format)

    def emit(op: Any, *args: Any, val: Any = val, **kwargs: Any) -> fx.Node:
        return insert_before(before, op, *args, like=value, kwargs=kwargs, val=val)

    if (fill := _fill(value)) is not None:
        number = argument(fill, "fill_value") if has(fill.target, Trait.FULL) else int(has(fill.target, Trait.ONES))
        return emit(aten.full.default, list(val.shape), number, dtype=val.dtype, device=val.device)
    if source := _cut(value):
        part, cut = _narrowed(source, dim, length, before), value
        if value.target is operator.getitem:
            cut = value.all_input_nodes[0]
        if _dim(cut) == dim:
            return part
        vals = cut.target(part.meta["val"], *cut.args[1:])
        made = emit(cut.target, part, *cut.args[1:], val=vals)
        return made if cut is value else emit(operator.getitem, made, value.args[1])
    if value.target in _PRODUCTS:
        *added, rows, columns = value.args
        return emit(value.target, *added, _narrowed(rows, dim, length, before), columns, **value.kwargs)
    parts = {
        each: each if _is_repeated(each, value, dim) else _narrowed(each, dim - _lacking(value, each), length, before)
        for each in value.all_input_nodes
    }
    args, kwargs = fx.map_arg((value.args, value.kwargs), parts.__getitem__)
    return emit(value.target, *args, **kwargs)


def _lacking(result: fx.Node, operand: fx.Node) -> int:
    return int(result.meta["val"].ndim - operand.meta["val"].ndim)
