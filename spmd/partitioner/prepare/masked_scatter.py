"""``masked_scatter`` as ops that have rules: elements of the whole batch in order, or of each part of it from its own.

The true elements of a mask take those of the source one after the other, so that a row takes what is left by the rows
before it: all of them count. Where each of several parts of the batch takes as many as its own rows of the source have,
none of them needs another one. That depends on values, and an op of each part looks (``places_in_rows.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx

from passes import Program
from passes.runtime.places_in_rows import places

from .traced_ops import inlined

aten = torch.ops.aten
_OPS = (aten.masked_scatter.default, aten.masked_scatter_backward.default)


def lower_masked_scatters(program: Program, parts: int = 1) -> Program:
    """The program without ``masked_scatter``; each of ``parts`` equal parts of the batch takes from its own rows.

    Where the elements of one cannot be divided so, and for one part, the whole batch is looked at. ``program`` is left
    as it is.
    """
    if not any(node.target in _OPS for node in program.graph.nodes):
        return program
    program = program.copy()
    for node in [each for each in program.graph.nodes if each.target in _OPS]:
        node.replace_all_uses_with(inlined(node, _lowered(node, parts)))
        program.graph.erase_node(node)
    return program


def _lowered(node: fx.Node, parts: int) -> Callable[..., Tensor]:
    is_forward = node.target is _OPS[0]
    x, source = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if is_forward:
        source = node.args[2].meta["val"]  # type: ignore[union-attr]
    if parts == 1 or x.numel() % parts or source.numel() % parts or not source.numel():
        return _take_in_order if is_forward else _give_back_in_order
    op = f"masked_scatter ({node.meta['source']})" if node.meta.get("source") else "masked_scatter"
    return partial(_take_in_parts if is_forward else _give_back_in_parts, parts=parts, op=op)


def _take_in_order(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Each true position of the mask takes the element of ``source`` at its rank; only counts cross rows."""
    x, mask = torch.broadcast_tensors(x, mask)
    if not source.numel():
        return x.clone()
    values = source.reshape(-1)[_source_indices(mask).clamp(0, source.numel() - 1)]
    return torch.where(mask, values, x)


def _give_back_in_order(grad: Tensor, mask: Tensor, sizes: list[int]) -> Tensor:
    """The gradient of each element of ``source``, zero for those that were not used."""
    mask = mask.expand_as(grad)
    count = math.prod(sizes)
    indices = _source_indices(mask).clamp(0, max(count - 1, 0)).reshape(-1)
    values = torch.where(mask, grad, torch.zeros_like(grad)).reshape(-1)
    return grad.new_zeros(count).scatter_add(0, indices, values).view(sizes)


def _source_indices(mask: Tensor) -> Tensor:
    """For each true element the number of true ones before it, counted row by row so that rows may be split."""
    if mask.ndim == 0:
        return torch.zeros_like(mask, dtype=torch.long)
    inside = mask.reshape(len(mask), -1).long().cumsum(1)
    counts = mask.reshape(len(mask), -1).sum(1)
    return (inside - 1 + (counts.cumsum(0) - counts)[:, None]).view(mask.shape)


def _take_in_parts(x: Tensor, mask: Tensor, source: Tensor, parts: int, op: str) -> Tensor:
    """The same where each part takes all elements of its own rows of ``source``, and no other ones."""
    x = x.expand(torch.broadcast_shapes(x.shape, mask.shape))
    width = _width(x, mask, source.numel() // parts)
    own, at = _in_parts(mask.expand(x.shape), source.numel(), width, parts, op)
    values = source.reshape(parts, -1, width).gather(1, at)
    return torch.where(own, values, x.reshape(parts, -1, width)).view(x.shape)


def _give_back_in_parts(grad: Tensor, mask: Tensor, sizes: list[int], parts: int, op: str) -> Tensor:
    """The gradients of all elements of the rows of each part."""
    count = math.prod(sizes)
    width = _width(grad, mask, count // parts)
    own, at = _in_parts(mask.expand_as(grad), count, width, parts, op)
    values = torch.where(own, grad.reshape(parts, -1, width), 0)
    return grad.new_zeros(parts, count // parts // width, width).scatter_add(1, at, values).view(sizes)


def _width(x: Tensor, mask: Tensor, each: int) -> int:
    """The number of elements side by side of which the mask takes all or none."""
    shape = (1,) * (x.ndim - mask.ndim) + tuple(mask.shape)
    first = next((d for d in reversed(range(x.ndim)) if shape[d] > 1), 0) + 1
    width = math.prod(x.shape[max(first, 1) :])
    return width if each % width == 0 else 1


def _in_parts(mask: Tensor, count: int, width: int, parts: int, op: str) -> tuple[Tensor, Tensor]:
    """(the mask, where its true elements find theirs in their part's ``count // parts``): (parts, length, width)."""
    own = mask.reshape(parts, -1, width)
    at = places(own[:, :, 0], count // parts // width, op)
    return own, at[:, :, None].expand(-1, -1, width)
