"""How operands may lie in memory, and operands of unusual sizes: what the engine tries besides plain samples.

A rule speaks of values, and passes decide where these lie. ``anyhow`` puts a tensor at any offset of a longer storage,
with gaps between rows, dims in another order, and equal rows stored once; ``in_a_bucket`` at any offset alone. What
lies in between is not a number, so that a kernel that reads it is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

Lay = Callable[[torch.Tensor, torch.Tensor, Random], torch.Tensor]
"""``(part, whole, draw) -> the same values as those of the part, lying elsewhere``."""


def anyhow(part: torch.Tensor, whole: torch.Tensor, draw: Random) -> torch.Tensor:
    """``part`` as a view of other memory may be; dims along which the whole is constant are expanded, or not."""
    if part.is_meta:
        return part
    order = list(range(part.ndim))
    if draw.random() < 0.4:
        draw.shuffle(order)
    gaps = [draw.choice((0, 0, 1, 3)) for _ in order]
    expanded = {d for d in order if draw.random() < 0.7 and is_constant(whole, d) and is_constant(part, d)}
    return _copied(part, order, gaps, expanded, draw.choice((1, 1, 1, 2)), draw.randrange(17))


def in_a_bucket(part: torch.Tensor, whole: torch.Tensor, draw: Random) -> torch.Tensor:
    """``part`` contiguous at any offset, as passes put parameters, gradients and the members of buckets."""
    if part.is_meta:
        return part
    return _copied(part, list(range(part.ndim)), [0] * part.ndim, set(), 1, draw.randrange(17))


def with_heads_in_rows(part: torch.Tensor, whole: torch.Tensor, draw: Random) -> torch.Tensor:
    """``part`` of (batch, heads, rows, features) as attention gives it: the heads of a row next to each other."""
    return part.transpose(1, 2).contiguous().transpose(1, 2)


def on_its_own(part: torch.Tensor, whole: torch.Tensor, draw: Random) -> torch.Tensor:
    """``part`` at the start of its own storage, with dims in the order that it has them."""
    return part.clone()


def _copied(
    tensor: torch.Tensor, order: list[int], gaps: list[int], expanded: set[int], step: int, offset: int
) -> torch.Tensor:
    """A copy whose dims lie in ``order``, the last one ``step`` apart, with ``gaps`` rows after those of each dim."""
    strides, stride = [0] * tensor.ndim, step
    for d in reversed(order):
        if d not in expanded:
            strides[d] = stride
            stride *= max(tensor.shape[d], 1) + gaps[d]
    between = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    memory = tensor.new_full((offset + stride + 9,), between)
    once = tuple(slice(0, 1) if d in expanded else slice(None) for d in range(tensor.ndim))
    memory.as_strided(tensor[once].shape, strides, offset).copy_(tensor[once])
    return memory.as_strided(tensor.shape, strides, offset)


def is_constant(tensor: torch.Tensor, dim: int) -> bool:
    """Whether all rows along ``dim`` are equal, of more than one."""
    return (
        not tensor.is_meta
        and tensor.shape[dim] > 1
        and tensor.numel() > 0
        and bool((tensor == tensor.narrow(dim, 0, 1)).all())
    )


def resized(args: Any, size: int, to: int) -> Iterator[Any]:
    """``args`` with ``to`` rows along each dim of ``size``, and also with that number in its lists of numbers.

    Indices into a dim that has lost rows would be out of range, which not every kernel notices: they are zero then, and
    where no row is left, there must be no index.
    """

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        for d, n in enumerate(tensor.shape):
            tensor = tensor.narrow(d, 0, to) if n == size else tensor
        return torch.zeros_like(tensor) if tensor.dtype is torch.int64 else tensor.clone()

    def renumbered(value: Any) -> Any:
        numbers = isinstance(value, list) and all(isinstance(n, int) for n in value)
        return [to if n == size else n for n in value] if numbers and size in value else value

    found = tree_map_only(torch.Tensor, narrowed, args)
    indices = [leaf for leaf in tree_leaves(found) if _is_index(leaf)]
    if any(index.numel() and (to == 0 or index.dtype is not torch.int64) for index in indices):
        return
    yield tree_map(renumbered, found, is_leaf=lambda value: renumbered(value) is not value)


def with_equal_rows(args: Any, draw: Random) -> Any:
    """``args`` with equal rows along a dim of one tensor."""
    tensors = [leaf for leaf in tree_leaves(args) if _has_rows(leaf)]
    if not tensors:
        return None
    chosen = draw.choice(tensors)
    dim = draw.choice([d for d, n in enumerate(chosen.shape) if n > 1])
    equal = chosen.narrow(dim, 0, 1).expand_as(chosen).contiguous()
    return tree_map_only(torch.Tensor, lambda tensor: equal if tensor is chosen else tensor, args)


def _is_index(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int32, torch.int64)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and max(leaf.shape, default=0) > 1
