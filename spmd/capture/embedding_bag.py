"""Decompose ``embedding_bag``: look up rows of a table by ids, then reduce the rows of each bag.

torch's op takes all ids in one row and the offset at which each bag begins, so a rule would need all of both. Where
bags have equal lengths, as those of a padded (bag, id) tensor do, the ids are reshaped to such a tensor again, and each
bag is a row of the batch. Elsewhere ids may be split at any position: each rank sums its ids of every bag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .values.known_values import is_range

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)


def embedding_bag_table() -> dict[Any, Any]:
    """The decompositions, by op."""
    return {
        aten._embedding_bag.default: _forward,
        aten._embedding_bag_forward_only.default: _forward,
        aten._embedding_bag_backward.default: _backward,
        aten._embedding_bag_per_sample_weights_backward.default: _weights_backward,
    }


@dataclass(frozen=True)
class _EmbeddingBags:
    """Ids in embedding bags: ``ids`` is (bag, id), or (id,) with the bag of each in ``bag``."""

    ids: Tensor
    count: int
    bag: Tensor | None
    padding: int

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor, count: int, padding: int) -> _EmbeddingBags:
        """The bags that begin at ``offsets``: (bag,) or one more, the end. ``ids``: (id,)."""
        starts = offsets[:count]
        length = len(ids) // max(count, 1)
        if length * count == len(ids) and is_range(starts, length):
            return cls(ids.reshape(count, length), count, None, padding)
        positions = torch.arange(len(ids), dtype=starts.dtype, device=ids.device)
        return cls(ids, count, torch.searchsorted(starts, positions, right=True) - 1, padding)

    def sum(self, rows: Tensor) -> Tensor:
        """Sum over each bag: (ids..., width) to (bag, width)."""
        if self.bag is None:
            return rows.sum(1)
        return rows.new_zeros(self.count, *rows.shape[1:]).index_add(0, self.bag, rows)

    def expand(self, values: Tensor) -> Tensor:
        """Give each id the value of its bag: (bag, width) to (ids..., width)."""
        if self.bag is None:
            return values.unsqueeze(1).expand(*self.ids.shape, *values.shape[1:])
        return values.index_select(0, self.bag)

    def present(self, like: Tensor) -> Tensor:
        """(ids..., 1): ones, and zeros for padding."""
        return (self.ids != self.padding).to(like.dtype).unsqueeze(-1)

    def weights(self, given: Tensor | None, like: Tensor) -> Tensor:
        """(ids..., 1): the weight of each row."""
        return self.present(like) if given is None else self.present(like) * given.reshape(self.ids.shape).unsqueeze(-1)

    def sizes(self, like: Tensor) -> Tensor:
        """(bag, 1): the number of ids that a mean divides by."""
        return self.sum(self.present(like)).clamp(min=1)


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
    """(bag, width), and what backward takes: it needs the sizes of bags, and the ids of the largest rows."""
    bags = _EmbeddingBags.of(ids, offsets, len(offsets) - include_last_offset, padding_idx)
    if sparse or (mode == _MAX and bags.bag is not None):
        return NotImplemented
    rows = aten.embedding(table, bags.ids)
    sizes = bags.sizes(rows)
    largest = bags.ids.new_zeros(bags.count)
    if mode == _MAX:
        out, largest = _maximum(bags, rows)
    else:
        out = bags.sum(rows * bags.weights(weights, rows))
        out = out / sizes if mode == _MEAN else out
    return out, ids.new_empty(0), sizes, largest


def _maximum(bags: _EmbeddingBags, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each column in a bag, zero in an empty one, and the id it is from, -1 for none."""
    present = bags.present(rows) != 0
    largest, index = rows.masked_fill(~present, float("-inf")).max(1)
    empty = ~present.any(1)
    chosen = bags.ids.gather(1, index)
    return largest.masked_fill(empty, 0.0), chosen.masked_fill(empty, -1)


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
        received = grad.masked_fill(largest < 0, 0.0)
        return grad.new_zeros(rows, grad.shape[1]).scatter_add(0, largest.clamp(min=0), received)
    bags = _EmbeddingBags.of(ids, offsets, len(grad), padding_idx)
    each = bags.expand(grad / sizes if mode == _MEAN else grad) * bags.weights(weights, grad)
    return aten.embedding_dense_backward(each, bags.ids, rows, padding_idx, scale_grad_by_freq)


def _weights_backward(
    grad: Tensor, table: Tensor, ids: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """The gradient of the weights of single ids."""
    bags = _EmbeddingBags.of(ids, offsets, len(grad), padding_idx)
    rows: Tensor = aten.embedding(table, bags.ids)
    return (bags.expand(grad) * rows * bags.present(grad)).sum(-1).reshape(ids.shape)
