"""``as_strided`` as a chain of views: the same elements, named by dims of the tensor instead of by places in memory.

A program is about values. Passes move where these lie, and a rank has parts of them, so no op that reads strides or the
offset in a storage may stay in it. At capture the geometry is that of eager: there each ``as_strided`` becomes slices,
diagonals, reshapes and windows of its operand, through which writes pass as they do in eager. What no such chain gives,
above all elements outside of the operand, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .unsupported import Refused

aten = torch.ops.aten

Dim = tuple[int, int]
"""(size, stride) of a dim with more than one element, each with memory of its own."""


def strided_views_table() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by op."""
    return {
        aten.as_strided.default: strided_view,
        aten.as_strided_.default: _unchanged,
        aten.as_strided_copy.default: lambda *args: strided_view(*args).clone(),
        aten.as_strided_scatter.default: _scattered,
        aten.resize_.default: _resized,
        aten.resize_as_.default: lambda x, like, **_: _resized(x, like.shape),
        **dict.fromkeys((getattr(aten.set_, name) for name in aten.set_.overloads()), _refuse_set),
    }


def strided_view(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """The tensor that ``x.as_strided(size, stride, storage_offset)`` is, as views of ``x``.

    Raises ``Refused`` if no chain of views gives it.
    """
    offset = int(x.storage_offset()) if storage_offset is None else storage_offset
    if 0 in size:
        return x.new_empty(size)
    dims = [(n, step) for n, step in zip(size, stride, strict=True) if _is_proper(n, step)]
    dims.sort(key=lambda dim: -dim[1])
    found = _pick(_proper(x), 0, dims, offset - int(x.storage_offset())) if x.numel() else None
    view = None if found is None else _arranged(found, dims, size, stride)
    if view is None or not _lies_so(view, size, stride, offset):
        raise Refused(
            f"it takes {list(size)} elements with strides {list(stride)} from the memory of a tensor of shape "
            f"{list(x.shape)} and strides {list(x.stride())} by as_strided, and no slices, diagonals, reshapes and "
            "windows of that tensor are these elements. Index the tensor that has them, or use unfold."
        )
    return aten.alias.default(view) if view is x else view


def _unchanged(x: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """``x`` itself, if only the strides of dims of size 1 change."""
    offset = int(x.storage_offset()) if storage_offset is None else storage_offset
    if tuple(size) != tuple(x.shape) or not _lies_so(x, size, stride, offset):
        raise Refused(
            f"it gives a tensor of shape {list(x.shape)} another shape or other strides by as_strided_. Make a new "
            "tensor, with reshape or permute."
        )
    return x


def _scattered(x: Tensor, src: Tensor, size: list[int], stride: list[int], storage_offset: int | None = None) -> Tensor:
    """``x`` with the elements that ``as_strided`` takes replaced by ``src``."""
    offset = 0 if storage_offset is None else storage_offset - int(x.storage_offset())
    copy = x.clone()
    if copy.stride() != x.stride():
        raise Refused("it writes by as_strided_scatter into a tensor with gaps in memory. Write into x.contiguous().")
    strided_view(copy, size, stride, offset).copy_(src)
    return copy


def _resized(x: Tensor, size: Sequence[int], **_: Any) -> Tensor:
    """``x`` itself, if it has this shape already."""
    if tuple(size) != tuple(x.shape):
        cold = " If a layer does so in its first forward, run the model once before the first step, in no_grad()."
        raise Refused(
            f"it gives a tensor of shape {list(x.shape)} the shape {list(size)} by resize_, which shows its memory "
            f"anew. Make a new tensor, with reshape, a slice or torch.cat.{'' if x.numel() else cold}"
        )
    return x


def _refuse_set(x: Tensor, *_: Any, **__: Any) -> Tensor:
    raise Refused("it puts a tensor into other memory by set_. Copy instead, with tensor.copy_(value).")


def _is_proper(size: int, stride: int) -> bool:
    """Whether a dim has elements of its own: neither one alone, nor one that is repeated."""
    return size > 1 and stride > 0


def _proper(x: Tensor) -> Tensor:
    """``x`` without its other dims, the outermost in memory first."""
    for d in reversed(range(x.ndim)):
        if not _is_proper(x.shape[d], x.stride(d)):
            x = x.select(d, 0)
    order = sorted(range(x.ndim), key=lambda d: x.stride()[d], reverse=True)
    return x if order == list(range(x.ndim)) else x.permute(order)


def _pick(x: Tensor, at: int, dims: Sequence[Dim], start: int) -> Tensor | None:
    """The view of ``x`` with its first ``at`` dims, then ``dims``; ``start`` elements after the first one of ``x``.

    Its dims from ``at`` on, and ``dims``, come in the order of memory. None if there is no such view.
    """
    if at == x.ndim:
        return x if not dims and start == 0 else None
    inside = _span(list(zip(x.shape, x.stride(), strict=True))[at + 1 :])
    row, within = divmod(start, x.stride(at))
    if not 0 <= row < x.shape[at]:
        return None
    if _span(dims) + within <= inside:
        return _pick(x.select(at, row), at, dims, within)
    if dims and dims[0][1] % x.stride(at) == 0 and _span(dims[1:]) + within <= inside:
        return _rows(x, at, dims, row, within)
    return (_in_last_dim if at + 1 == x.ndim else _in_two_dims)(x, at, dims, start)


def _rows(x: Tensor, at: int, dims: Sequence[Dim], row: int, within: int) -> Tensor | None:
    """The first of ``dims`` is every so manieth row of the dim ``at``; the others lie within a row."""
    count, step = dims[0][0], dims[0][1] // x.stride(at)
    end = row + (count - 1) * step + 1
    if end > x.shape[at]:
        return None
    if (row, end, step) != (0, x.shape[at], 1):
        x = aten.slice.Tensor(x, at, row, end, step)
    return _pick(x, at + 1, dims[1:], within)


def _in_two_dims(x: Tensor, at: int, dims: Sequence[Dim], start: int) -> Tensor | None:
    """A diagonal of the dims ``at`` and ``at + 1``, or what there is when they are one dim."""
    (rows, columns), (down, right) = x.shape[at : at + 2], x.stride()[at : at + 2]
    if dims and dims[0][1] == down + right:
        (row, rest), count = divmod(start, down), dims[0][0]
        column, within = divmod(rest, right)
        if row + count <= rows and column + count <= columns:
            square = x.narrow(at, row, count).narrow(at + 1, column, count)
            diagonal = square.diagonal(0, at, at + 1).movedim(-1, at)
            return _pick(diagonal, at + 1, dims[1:], within)
    if down != columns * right:
        return None
    return _pick(x.view([*x.shape[:at], rows * columns, *x.shape[at + 2 :]]), at, dims, start)


def _in_last_dim(x: Tensor, at: int, dims: Sequence[Dim], start: int) -> Tensor | None:
    """Rows of a matrix that the last dim is, or windows of it that overlap."""
    if not dims:
        return None
    count, stride = dims[0]
    if start % x.stride(at) or stride % x.stride(at):
        return None
    first, step, size = start // x.stride(at), stride // x.stride(at), x.shape[at]
    length = _span(dims[1:]) // x.stride(at) + 1
    begin = min(first, size - count * step)
    if begin >= 0 and first - begin + length <= step:
        matrix = x.narrow(at, begin, count * step).view([*x.shape[:at], count, step])
        return _pick(matrix, at + 1, dims[1:], start - begin * x.stride(at))
    end = first + (count - 1) * step + length
    if end > size:
        return None
    return _pick(x.narrow(at, first, end - first).unfold(at, length, step), at + 1, dims[1:], 0)


def _arranged(found: Tensor, dims: Sequence[Dim], size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """``found``, whose dims are ``dims``, in the order of ``size``, with the dims of one element."""
    order: list[int] = []
    for n, step in zip(size, stride, strict=True):
        if _is_proper(n, step):
            order.append(next(k for k, dim in enumerate(dims) if dim == (n, step) and k not in order))
    if order != list(range(len(dims))):
        found = found.permute(order)
    for d, (n, step) in enumerate(zip(size, stride, strict=True)):
        if not _is_proper(n, step):
            found = found.unsqueeze(d)
    return found if tuple(found.shape) == tuple(size) else found.expand(size)


def _lies_so(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> bool:
    """Whether ``x`` has this geometry, where it matters."""
    strides = zip(size, x.stride(), stride, strict=True)
    same = all(mine == other for n, mine, other in strides if n > 1)
    return tuple(x.shape) == tuple(size) and same and x.storage_offset() == offset


def _span(dims: Sequence[Dim]) -> int:
    """The distance in memory from the first to the last element."""
    return sum((n - 1) * step for n, step in dims)
