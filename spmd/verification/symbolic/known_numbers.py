"""Ops by numbers that are known: of a step with experts, which rows go where, and sums and products of rows by that.

A whole number is known if it is an argument, a constant, computed from known ones, or chosen: what an op picks by
unknown elements (``topk``) is drawn at random. Known numbers are computed by torch; by them elements are moved, or are
added and multiplied in the field, exactly, so that rows may be in any order and on any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from passes.ir.ops import Trait, has
from passes.ir.schemas import schema
from passes.runtime.rooms import NAMESPACE as ROOMS

from ..._torch import OpOverload, tree_flatten, tree_map
from .. import symbols
from . import attention

Results = list[Any]

_LARGEST = 2**24  # a fraction is a larger residue
_CHOOSE = ("topk", "sort", "argsort", "argmax", "argmin")
_TAKE = ("index", "_unsafe_index", "index_select", "embedding", "gather")
_JOIN = ("where", "masked_fill", "scatter", "index_put")  # of several tensors, one
_ADD = ("index_add", "scatter_add", "index_put", "_unsafe_index_put")
_WITHOUT = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def numbers(x: Tensor) -> Tensor | None:
    """The values of elements that are known; None if some is not."""
    dtype, (found, marks) = symbols.dtype_of(x), symbols.pieces(x)
    if dtype is None or dtype.is_complex or bool((marks & (symbols.PENDING | symbols.DOUBT)).any()):
        return None
    lowest = (found == attention.LOWEST) & dtype.is_floating_point
    values = symbols.whole_numbers(found).masked_fill(lowest, 0)
    if bool((values.abs() > _LARGEST).any()):
        return None
    return values.to(dtype).masked_fill(lowest, -torch.inf) if bool(lowest.any()) else values.to(dtype)


def by_numbers(op: OpOverload, args: Any, kwargs: Any) -> Results | None:
    """The results of an op on known numbers, or of one that moves elements by them; None if it is neither."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _WITHOUT}
    known = tree_map(lambda x: numbers(x) if _is_elements(x) else x, (args, kwargs))
    given, values = (tree_flatten(each)[0] for each in ((args, kwargs), known))
    tensors = [(x, value) for x, value in zip(given, values, strict=True) if _is_elements(x)]
    name = schema(op).name
    if op.namespace == ROOMS:
        return _within(*args)
    if not tensors or has(op, Trait.RANDOM) or "empty" in name or len(given) != len(values):
        return None
    if all(value is not None for _, value in tensors):
        results = op(*known[0], **known[1])
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        if name in ("histc", "amax") or all(not each.is_floating_point() for each in results):
            return [symbols.of_values(each) for each in results]
    return _moved(op, name, args) if name in _TAKE + _JOIN else None


def _within(ends: Tensor, each: int, rows: int, room: int) -> Results | None:
    """The ends of groups, if no rank has more rows than there is room for: a call would end there."""
    values = numbers(ends)
    if values is None:
        return None
    stops = [*values[each - 1 :: each].tolist()[:-1], rows]
    if max(b - a for a, b in pairwise([0, *stops])) > room:
        raise ValueError("a rank has more rows of experts than there is room for, by the routing that was drawn")
    return [ends.clone()]


def _moved(op: OpOverload, name: str, args: Any) -> Results | None:
    """Elements of one dtype, moved by indices or a mask that are known."""
    moves = [x for x in tree_flatten(args)[0] if _is_elements(x)]
    floats = {dtype for x in moves if (dtype := symbols.dtype_of(x)) is not None and dtype.is_floating_point}
    by = [numbers(x) for x in moves if symbols.dtype_of(x) not in floats]
    if len(floats) != 1 or any(x is None for x in by) or (name == "index_put" and args[3:4] == (True,)):
        return None
    if name in _JOIN and any(map(_is_pending, moves)):
        return None
    (dtype,) = floats

    def operand(x: Any) -> Any:
        if _is_elements(x):
            return x if symbols.dtype_of(x) == dtype else numbers(x)
        return symbols.of_values(torch.tensor(x, dtype=dtype)) if isinstance(x, (int, float)) else x

    if name == "where":
        return [torch.where(*map(operand, args))]
    if name == "masked_fill" and isinstance(args[2], (int, float)):
        found, mark = attention.filling(args[0], args[2])
        return [torch.where(operand(args[1]), symbols.elements(found, mark | symbols.mark_of(dtype)), args[0])]
    if name == "masked_fill":
        return [torch.where(operand(args[1]), operand(args[2]), args[0])]
    if name == "embedding":
        return [args[0][operand(args[1])]]
    if name == "scatter":
        x, dim, index, source = args
        index, source = operand(index), operand(source)
        return [x.scatter(dim, index, source if source.ndim else source.expand(index.shape))]
    return [op(*tree_map(lambda x: operand(x) if _is_elements(x) else x, args))]


def adds(op: OpOverload) -> bool:
    """Whether an op adds elements, so that of a part of them it gives a summand."""
    return schema(op).name in (*_FIELD, "bincount", "histc")


def in_field(op: OpOverload, args: Any, kwargs: Any) -> Results | None:
    """The results of an op that adds, or multiplies, by known numbers; None if it is none such."""
    name = schema(op).name
    function = _FIELD.get(name)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if _is_elements(x)]
    if function is None or any(map(_is_pending, tensors)):
        return None
    dtypes = [dtype for x in tensors if (dtype := symbols.dtype_of(x)) is not None and dtype.is_floating_point]
    if not dtypes or len(set(dtypes)) > 1 or kwargs.get("dtype", dtypes[0]) not in (None, dtypes[0]):
        return None
    unknown = symbols.UNKNOWN if any(map(symbols.is_unknown, tensors)) else 0
    found = function(op, _by_name(op, args, kwargs))
    return None if found is None else [symbols.elements(x, symbols.mark_of(dtypes[0]) | unknown) for x in found]


def chosen(op: OpOverload, start: Tensor, args: Any, kwargs: Any) -> Results | None:
    """Elements that an op picks of unknown ones, drawn at random, and their numbers; None if it picks none."""
    if schema(op).name not in _CHOOSE:
        return None
    x, *others = args
    generator = torch.Generator().manual_seed(int(start) % 2**31)
    picked = op(torch.rand(x.shape, generator=generator), *others, **kwargs)
    if isinstance(picked, Tensor):
        return [symbols.of_values(picked)]
    return [x.gather(_by_name(op, args, kwargs)["dim"], picked[1]), symbols.of_values(picked[1])]


def _by_name(op: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    declared = schema(op).arguments
    return {
        each.name: args[k] if k < len(args) else kwargs.get(each.name, each.default) for k, each in enumerate(declared)
    }


def _is_pending(x: Tensor) -> bool:
    return bool((symbols.pieces(x)[1] & symbols.PENDING).any())


def _is_elements(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.complex128


# Sums and products in the field, of symbols.


def _added(op: OpOverload, given: dict[str, Any]) -> list[Tensor] | None:
    """Rows added by number."""
    if given.get("alpha", 1) != 1 or given.get("accumulate", True) is False:
        return None
    index = given.get("index", given.get("indices"))
    index = tree_map(lambda x: numbers(x) if _is_elements(x) else x, index)
    if any(x is None for x in (index if isinstance(index, (list, tuple)) else [index])):
        return None
    replaced = given | {"index" if "index" in given else "indices": index}

    def lane(k: int) -> Tensor:
        own = {n: symbols.lane(symbols.pieces(x)[0], k) if _is_elements(x) else x for n, x in replaced.items()}
        found: Tensor = op(*(own[each.name] for each in schema(op).arguments if not each.kwarg_only))
        return found

    return [symbols.of_lanes(lane(0), lane(1))]


def _embedding_backward(op: OpOverload, given: dict[str, Any]) -> list[Tensor] | None:
    rows, grad = numbers(given["indices"]), symbols.pieces(given["grad_output"])[0]
    if rows is None or given["scale_grad_by_freq"]:
        return None
    counts = (rows != given["padding_idx"]).reshape(-1)
    lanes = []
    for k in range(2):
        added = symbols.lane(grad, k).flatten(0, -2)[counts]
        lanes.append(
            added.new_zeros(given["num_weights"], grad.shape[-1]).index_add(0, rows.reshape(-1)[counts], added)
        )
    return [symbols.of_lanes(*lanes)]


def _sum(op: OpOverload, given: dict[str, Any]) -> list[Tensor]:
    x, dims, keep = symbols.pieces(given["self"])[0], given.get("dim"), bool(given.get("keepdim"))
    dims = dims or list(range(x.ndim))
    lanes = (symbols.lane(x, k).sum(dims, keep) if dims else symbols.lane(x, k) for k in range(2))
    return [symbols.of_lanes(*lanes)]


def product(x: Tensor, y: Tensor) -> Tensor:
    """The product of matrices of symbols, or of equally many."""

    def lane(k: int) -> Tensor:
        terms = symbols.lane(x, k).unsqueeze(-1) * symbols.lane(y, k).unsqueeze(-3)
        return (terms % symbols.PRIME).sum(-2)

    return symbols.of_lanes(lane(0), lane(1))


def _bmm(op: OpOverload, given: dict[str, Any]) -> list[Tensor]:
    x, y = (symbols.pieces(given[name])[0] for name in ("self", "mat2"))
    return [product(x, y)]


def _bounds(ends: Tensor | None, rows: int) -> list[tuple[int, int]] | None:
    """The first row of each group, and that behind its last."""
    return None if ends is None else list(pairwise([0, *(min(each, rows) for each in ends.tolist())]))


def _grouped(op: OpOverload, given: dict[str, Any]) -> list[Tensor] | None:
    x, y = (symbols.pieces(each)[0] for each in list(given.values())[:2])
    ragged = x.shape[0] if y.ndim == 3 else x.shape[1] if x.ndim == 2 else y.shape[1]
    bounds = _bounds(numbers(given["offs"]), ragged)
    if bounds is None:
        return None
    if x.ndim == 2 and y.ndim == 3:
        return [_ragged([product(x[a:b], y[g]) for g, (a, b) in enumerate(bounds)], ragged, 0)]
    if x.ndim == 3:
        return [_ragged([product(x[g], y[:, a:b]) for g, (a, b) in enumerate(bounds)], ragged, 1)]
    return [torch.stack([product(x[:, a:b], y[a:b]) for a, b in bounds])]


def _ragged(parts: Sequence[Tensor], rows: int, dim: int) -> Tensor:
    """The products of all groups; those behind the last group are zero, or have no value that may reach another."""
    found = torch.cat(list(parts), dim)
    shape = [*found.shape]
    shape[dim] = rows - shape[dim]
    return torch.cat([found, found.new_zeros(shape)], dim)


def _grouped_backward(op: OpOverload, given: dict[str, Any]) -> list[Tensor] | None:
    rows, weight, grad = (symbols.pieces(given[name])[0] for name in ("input", "weight", "grad_output"))
    bounds = _bounds(numbers(given["offs"]), len(rows))
    if bounds is None:
        return None
    of_rows = [product(grad[a:b], weight[g].t()) for g, (a, b) in enumerate(bounds)]
    of_weights = [product(rows[a:b].t(), grad[a:b]) for a, b in bounds]
    return [_ragged(of_rows, len(rows), 0), torch.stack(of_weights)]


_FIELD: dict[str, Callable[[OpOverload, dict[str, Any]], list[Tensor] | None]] = {
    **dict.fromkeys(_ADD, _added),
    "embedding_dense_backward": _embedding_backward,
    "sum": _sum,
    "bmm": _bmm,
    "_grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
    "grouped_mm_fallback_backward": _grouped_backward,
}
