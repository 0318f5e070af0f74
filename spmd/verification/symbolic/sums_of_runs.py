"""Sums over the runs of a call on symbols: what each run adds has a share of its own, and only all shares are the sum.

In a run a value that is still to be summed up is named by the sum over all runs, as it is over ranks, and marked with
the axis of micro-batches. Outside of it, such as in an accumulator, it counts as that symbol times the run's share, and
has the mark of one axis more. The shares add up to one: if a run is left out or counts twice, what comes about is no
value of the captured program. Where the order of sums is promised, they are no sums in the field: a pair of sums is a
hash of both, and complete is what the balanced tree over all parts gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from passes import Axis, Mesh

from ...micro_batches.accumulate import TIME, TIME_AXIS
from .. import symbols

aten = torch.ops.aten
ADDS = {aten.add.Tensor: False, aten._foreach_add.List: True}
"""The ops that add to accumulators, and whether they take lists."""


@dataclass
class Shares:
    """The shares of all parts. ``axes``: how many axes the ranks have; ``in_a_tree``: in which order sums count."""

    count: int
    axes: int
    in_a_tree: bool
    _sums: dict[torch.dtype | None, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        own = [torch.tensor(symbols.key("share", k)) for k in range(self.count - 1)]
        self.of_part = [*own, reduce(symbols.minus, own, torch.tensor(symbols.number(1)))]
        self.in_run, self.summed = symbols.pending(self.axes, "sum"), symbols.pending(self.axes + 1, "sum")

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of symbols, of which zero adds nothing."""
        if not self.in_a_tree:
            return symbols.plus(x, y)
        both = symbols.hashed(symbols.key("sum"), torch.minimum(x, y), torch.maximum(x, y))
        return torch.where(x == 0, y, torch.where(y == 0, x, both))

    def of_all(self, x: Tensor) -> Tensor:
        """Symbols of ``x`` when all parts were added up."""
        if not self.in_a_tree:
            return x
        found = [symbols.times(x, share) for share in self.of_part]
        while len(found) > 1:
            found = [self.add(*pair) for pair in zip(found[::2], found[1::2], strict=True)]
        return found[0]

    def completed(self, x: Tensor, known: Tensor) -> Tensor:
        """Elements of which those that are sums over all parts are what these are; ``known``: all that they may be.

        A sum of values that were cast is not known to be what the sum is, cast: other numbers are rounded.
        """
        found, marks = symbols.pieces(x)
        for dtype in (None, symbols.dtype_of(x)):
            summed = marks & self.summed != 0
            if not bool(summed.any()):
                break
            sums, values = self._sums_of(known, dtype)
            at = torch.searchsorted(sums, found.contiguous()).clamp(max=len(sums) - 1)
            complete = summed & (sums[at] == found)
            found = torch.where(complete, values[at], found)
            doubt = 0 if dtype is None else symbols.UNKNOWN
            marks = torch.where(complete, marks & ~self.summed | doubt, marks)
        return symbols.elements(found, marks)

    def _sums_of(self, known: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """The sums over all parts of these symbols, or of what they are in another dtype, in order; and the symbols."""
        if dtype not in self._sums:
            values = known if dtype is None else symbols.cast(known, dtype)
            sums, order = self.of_all(values).sort()
            self._sums[dtype] = sums, values[order]
        return self._sums[dtype]


@dataclass(frozen=True)
class Run:
    """The run of one part."""

    number: int
    shares: Shares

    def mesh(self, mesh: Mesh) -> Mesh:
        """The mesh of the ranks, with the axis of the parts."""
        return replace(mesh, axes=(*mesh.axes, Axis(TIME, self.shares.count, TIME, self.number, roles=(TIME_AXIS,))))

    def outside(self, x: Tensor) -> Tensor:
        """Elements as they count outside of the run."""
        found, marks = symbols.pieces(x)
        own = marks & self.shares.in_run != 0
        scaled = symbols.times(found, self.shares.of_part[self.number])
        return symbols.elements(torch.where(own, scaled, found), marks & ~self.shares.in_run | self.shares.summed)

    def added(self, op: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor] | None:
        """The results of an op that adds to sums over runs; None for any other."""
        if op not in ADDS or kwargs or len(args) != 2 or not any(map(self.is_sum, symbols.tensors_of(list(args)))):
            return None
        pairs = zip(*args, strict=True) if ADDS[op] else [args]
        return [self.sum_of(*pair) for pair in pairs]

    def is_sum(self, x: Tensor) -> bool:
        """Whether some elements are sums over runs."""
        return bool((symbols.pieces(x)[1] & self.shares.summed).any())

    def sum_of(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of two tensors of elements, outside of the run."""
        (one, marks), (other, others) = (symbols.pieces(self.outside(each)) for each in torch.broadcast_tensors(x, y))
        differ = ((marks ^ others) & symbols.PENDING != 0) & (one != 0) & (other != 0)
        unknown = differ * symbols.UNKNOWN  # a sum over ranks and a value that is none
        return symbols.elements(self.shares.add(one, other), marks | others | unknown)


@dataclass
class Sum:
    """An accumulator between runs, with the operations of a tensor that ``passes.ir.micro_batches`` applies to it."""

    shares: Shares
    value: Tensor

    def copy_(self, other: Sum) -> None:
        """Become equal to another."""
        self.value = other.value.clone()

    def zero_(self) -> None:
        """Hold the sum of nothing."""
        found, marks = symbols.pieces(self.value)
        self.value = symbols.elements(torch.zeros_like(found), marks & ~symbols.PENDING | self.shares.summed)

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.shares, Run(0, self.shares).sum_of(self.value, other.value))
