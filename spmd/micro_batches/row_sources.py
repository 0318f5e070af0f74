"""Values whose rows are equal, by the ops that make them: what is filled or repeated, and what follows from that.

Positions and types of tokens are repeated for each row, and so is all that a model computes from them: which tokens
look at which, what a table of embeddings has for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from passes.ir.ops import Trait, has
from passes.ir.schemas import argument

from ..rules.views import groups

aten = torch.ops.aten

Sources = list[tuple[fx.Node, int]]
"""Operands, each with one of its dims."""

FILLS = (Trait.ZEROS, Trait.ONES, Trait.FULL)
TUPLES = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)


def equal_dims(graph: fx.Graph) -> dict[fx.Node, set[int]]:
    """The dims of each value along which it surely is the same at all positions."""
    found: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        val, given = node.meta.get("val"), [found[each] for each in node.all_input_nodes]
        if node.target in TUPLES:
            found[node] = given[0]  # for what is taken out of it, which looks at the operand
        elif isinstance(val, torch.Tensor) and (any(given) or repeats(node) or has(node.target, *FILLS)):
            found[node] = {dim for dim in range(val.ndim) if _follows(sources(node, dim), found)}
        else:
            found[node] = set()  # as most are
    return found


def sources(value: fx.Node, dim: int) -> Sources | None:
    """The operands that have to be equal along a dim of theirs for a value to be equal along ``dim``.

    None: nothing is known of the op, or its result differs along ``dim`` in any case.
    """
    if value.op != "call_function":
        return None
    if has(value.target, *FILLS):
        return []
    rule = _BY_OP.get(value.target) or next(
        (rule for trait, rule in _BY_TRAIT.items() if has(value.target, trait)), None
    )
    return rule(value, dim) if rule is not None else None


def repeats(value: fx.Node) -> bool:
    """Whether an op may have the same rows again."""
    return has(value.target, Trait.EXPANDS) or value.target is aten.repeat.default


def along(cut: fx.Node) -> int:
    """The dim that an op cuts, indexes or joins along."""
    val = cut.all_input_nodes[0].meta["val"]
    return int(argument(cut, "dim") or 0) % int(val.ndim)


def numbers_rows(index: Any, size: int) -> bool:
    """Whether an index is known to hold 0, 1, 2, ... up to ``size``, in one of its dims."""
    while isinstance(index, fx.Node) and has(index.target, Trait.SQUEEZES, Trait.RESHAPES):
        index = index.all_input_nodes[0]
    known = isinstance(index, fx.Node) and index.target in _ARANGES
    return known and index.args in ((size,), (0, size), (0, size, 1))


def index_dim(call: fx.Node, dim: int) -> int:
    """A dim of an indexed value, counted from the right in what its indices broadcast to."""
    inner: int = max(each.meta["val"].ndim for each in argument(call, "indices") if each is not None)
    return dim - _first_of_indices(call) - inner


def _follows(given: Sources | None, found: dict[fx.Node, set[int]]) -> bool:
    return given is not None and all(dim in found[each] for each, dim in given)


def _pointwise(value: fx.Node, dim: int) -> Sources | None:
    if has(value.target, Trait.RANDOM):
        return None
    at = dim - value.meta["val"].ndim
    rows = [each for each in value.all_input_nodes if _length(each, at) > 1]
    return [(each, at + each.meta["val"].ndim) for each in rows]


def _length(operand: fx.Node, at: int) -> int:
    """Of a dim, counted from the right; 1 if the operand has no such dim."""
    val = operand.meta.get("val")
    return val.shape[at] if isinstance(val, torch.Tensor) and val.ndim >= -at else 1


def _expanded(value: fx.Node, dim: int) -> Sources | None:
    source, at = value.all_input_nodes[0], dim - value.meta["val"].ndim
    return [] if _length(source, at) == 1 else [(source, at + source.meta["val"].ndim)]


def _repeated(value: fx.Node, dim: int) -> Sources | None:
    """Several rows that are repeated are equal in turn alone."""
    at = dim - value.meta["val"].ndim
    is_one = argument(value, "repeats")[at] == 1 or _length(value.all_input_nodes[0], at) == 1
    return _expanded(value, dim) if is_one else None


def _reshaped(value: fx.Node, dim: int) -> Sources | None:
    source, shape = value.all_input_nodes[0], value.meta["val"].shape
    if 0 in shape:
        return None
    pairs = groups(tuple(source.meta["val"].shape), tuple(shape))
    return next(([(source, before[0])] for before, after in pairs if after == [dim] and len(before) == 1), None)


def _permuted(value: fx.Node, dim: int) -> Sources | None:
    source = value.all_input_nodes[0]
    order = list(range(value.meta["val"].ndim))
    if value.target is aten.permute.default:
        order = [each % len(order) for each in argument(value, "dims")]
    else:
        one, other = value.args[1:] if len(value.args) > 1 else (0, 1)
        order[one], order[other] = order[other], order[one]  # type: ignore[index]
    return [(source, order[dim])]


def _cut(value: fx.Node, dim: int) -> Sources | None:
    """Along the dim that is cut, too: some of equal rows are equal."""
    cut = value.all_input_nodes[0] if value.target is operator.getitem else value
    if value.target is operator.getitem and cut.target not in TUPLES:
        return None
    if value is cut and cut.target in TUPLES:
        return None
    is_gone = cut.target in (aten.unbind.int, aten.select.int) and dim >= along(cut)
    return [(cut.all_input_nodes[0], dim + is_gone)]


def _multiplied(value: fx.Node, dim: int) -> Sources | None:
    *added, rows, _ = value.args
    fits = dim == 0 and all(each.meta["val"].ndim == 1 for each in added)  # type: ignore[union-attr]
    return [(rows, 0)] if fits else None  # type: ignore[list-item]


def _looked_up(value: fx.Node, dim: int) -> Sources | None:
    index = argument(value, "indices")
    return [(index, dim)] if dim < index.meta["val"].ndim else None


def _scanned(value: fx.Node, dim: int) -> Sources | None:
    return [(value.all_input_nodes[0], dim)] if along(value) != dim else None


def _joined(value: fx.Node, dim: int) -> Sources | None:
    parts = value.all_input_nodes
    have_dim = all(each.meta["val"].ndim == value.meta["val"].ndim for each in parts)
    return [(each, dim) for each in parts] if have_dim and along(value) != dim else None


def _indexed(value: fx.Node, dim: int) -> Sources | None:
    """Along a dim of the indices: those that have it, or, where one numbers the rows of a dim, the rows there."""
    source = value.all_input_nodes[0]
    given = [(d, each) for d, each in enumerate(argument(value, "indices")) if each is not None]
    at = index_dim(value, dim)
    if at >= 0 or dim < _first_of_indices(value) or any(each.meta["val"].dtype in _MASKS for _, each in given):
        return None
    rows = [(d, each) for d, each in given if _length(each, at) > 1]
    sizes = source.meta["val"].shape
    numbered = {d for d, each in rows if numbers_rows(each, sizes[d])}
    return [(source, d) if d in numbered else (each, at + each.meta["val"].ndim) for d, each in rows]


def _first_of_indices(value: fx.Node) -> int:
    """The dim of the result at which those of the indices begin: where they stand if side by side, else the first."""
    given = [d for d, each in enumerate(argument(value, "indices")) if each is not None]
    return given[0] if given == list(range(given[0], given[-1] + 1)) else 0


_MASKS = (torch.bool, torch.uint8)
_ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_BY_OP: dict[Any, Callable[[fx.Node, int], Sources | None]] = {
    aten.mm.default: _multiplied,
    aten.addmm.default: _multiplied,
    aten.embedding.default: _looked_up,
    aten.cumsum.default: _scanned,
    aten.cat.default: _joined,
    aten.index.Tensor: _indexed,
    aten.repeat.default: _repeated,
    operator.getitem: _cut,
    **dict.fromkeys(TUPLES, _cut),
}
_BY_TRAIT: dict[Trait, Callable[[fx.Node, int], Sources | None]] = {
    Trait.EXPANDS: _expanded,
    Trait.RESHAPES: _reshaped,
    Trait.SQUEEZES: _reshaped,
    Trait.PERMUTES: _permuted,
    Trait.CUTS: _cut,
    Trait.POINTWISE: _pointwise,
}
