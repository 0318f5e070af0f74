"""Bags of embeddings, taken apart: rows of a table by ids, put together bag by bag.

torch's op takes all ids in one row and the offset at which each bag begins, so a rule would need all of both. Where
bags are equally long, as those of a padded (bag, id) tensor are, the ids are seen as such a tensor again, and each bag
is a row of the batch. Elsewhere ids may be split as they come: each rank adds up what it has of every bag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .known_values import is_range

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)


def bags() -> dict[Any, Any]:
    """Decompositions by op."""
    return {
        aten._embedding_bag.default: _forward,
        aten._embedding_bag_forward_only.default: _forward,
        aten._embedding_bag_backward.default: _backward,
        aten._embedding_bag_per_sample_weights_backward.default: _weights_backward,
    }


@dataclass(frozen=True)
class _Bags:
    """Ids in bags: ``ids`` is (bag, id), or (id,) with the bag of each in ``bag``."""

    ids: Tensor
    count: int
    bag: Tensor | None
    padding: int

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor, count: int, padding: int) -> _Bags:
        """``ids``: (id,), ``offsets``: (bag,) or one more, the end."""
        starts = offsets[:count]
        length = len(ids) // max(count, 1)
        if length * count == len(ids) and is_range(starts, length):
            return cls(ids.reshape(count, length), count, None, padding)
        places = torch.arange(len(ids), dtype=starts.dtype, device=ids.device)
        return cls(ids, count, torch.searchsorted(starts, places, right=True) - 1, padding)

    def collect(self, rows: Tensor) -> Tensor:
        """Sums over each bag: (ids..., width) to (bag, width)."""
        if self.bag is None:
            return rows.sum(1)
        return rows.new_zeros(self.count, *rows.shape[1:]).index_add(0, self.bag, rows)

    def spread(self, values: Tensor) -> Tensor:
        """To each id what its bag has: (bag, width) to (ids..., width)."""
        if self.bag is None:
            return values.unsqueeze(1).expand(*self.ids.shape, *values.shape[1:])
        return values.index_select(0, self.bag)

    def present(self, like: Tensor) -> Tensor:
        """(ids..., 1) ones, and zeros for padding."""
        return (self.ids != self.padding).to(like.dtype).unsqueeze(-1)

    def weights(self, given: Tensor | None, like: Tensor) -> Tensor:
        """(ids..., 1): what each row counts for."""
        return self.present(like) if given is None else self.present(like) * given.reshape(self.ids.shape).unsqueeze(-1)

    def sizes(self, like: Tensor) -> Tensor:
        """(bag, 1): how many ids a mean divides by."""
        return self.collect(self.present(like)).clamp(min=1)


def _forward(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """(bag, width), and what backward is given: of that it needs the sizes of bags, and which rows were the largest."""
    held = _Bags.of(ids, offsets, len(offsets) - include_last_offset, padding_idx)
    if sparse or (mode == _MAX and held.bag is not None):
        return NotImplemented
    rows = aten.embedding(table, held.ids)
    sizes = held.sizes(rows)
    largest = held.ids.new_zeros(held.count)
    if mode == _MAX:
        out, largest = _maximum(held, rows)
    else:
        out = held.collect(rows * held.weights(weights, rows))
        out = out / sizes if mode == _MEAN else out
    return out, ids.new_empty(0), sizes, largest


def _maximum(held: _Bags, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each column in a bag, zero in an empty one, and the id it is from, -1 for none."""
    present = held.present(rows) != 0
    most, place = rows.masked_fill(~present, float("-inf")).max(1)
    empty = ~present.any(1)
    chosen = held.ids.gather(1, place)
    return most.masked_fill(empty, 0.0), chosen.masked_fill(empty, -1)


def _backward(
    grad: Tensor,
    ids: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    sizes: Tensor,
    largest: Tensor,
    rows: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """The gradient of the table."""
    if sparse or (mode == _MAX and largest.ndim == 1):
        return NotImplemented
    if mode == _MAX:
        taken = grad.masked_fill(largest < 0, 0.0)
        return grad.new_zeros(rows, grad.shape[1]).scatter_add(0, largest.clamp(min=0), taken)
    held = _Bags.of(ids, offsets, len(grad), padding_idx)
    each = held.spread(grad / sizes if mode == _MEAN else grad) * held.weights(weights, grad)
    return aten.embedding_dense_backward(each, held.ids, rows, padding_idx, scale_grad_by_freq)


def _weights_backward(
    grad: Tensor, table: Tensor, ids: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """The gradient of the weights of single ids."""
    held = _Bags.of(ids, offsets, len(grad), padding_idx)
    rows: Tensor = aten.embedding(table, held.ids)
    return (held.spread(grad) * rows * held.present(grad)).sum(-1).reshape(ids.shape)
