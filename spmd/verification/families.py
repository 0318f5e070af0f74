"""The values of ranks of a group that are not looked at, inferred from those of others.

Of an axis of a thousand ranks the first two and the last are looked at. Where these hold the same, all do; where they
hold their parts of a value of the captured program, split along one dim, the others hold theirs. Anything else is not
known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..placements import chunk
from . import symbols
from .machine import CapturedMachine
from .symbolic_ops import Unknown


@dataclass(frozen=True)
class _Split:
    """Elements that are parts of ``value`` along ``dim``: where they stand in the first part, and in the operand."""

    value: Tensor
    dim: int
    first: Tensor
    places: Tensor
    beyond: Tensor  # what a rank has in the place of an element that its shorter part lacks

    def of(self, coordinate: int, size: int) -> Tensor:
        """The symbols that a rank of an axis of this size has."""
        start, length = chunk(self.value.shape[self.dim], size, coordinate)
        step = self.value.stride(self.dim)
        row = self.first // step % self.value.shape[self.dim]
        inside = row < length
        at = torch.where(inside, self.first + start * step, 0)
        return torch.where(inside, self.value.reshape(-1)[at], self.beyond)


class Family:
    """Values of each rank along an axis of ``size``; ``held`` by some, by coordinate, the first one's among them."""

    def __init__(self, captured: CapturedMachine, held: Mapping[int, Tensor], size: int) -> None:
        self.held, self.size = held, size
        self._symbols = {k: symbols.pieces(x)[0].reshape(-1) for k, x in held.items()}
        marks = [symbols.pieces(x)[1] for x in held.values()]
        if not all(torch.equal(each, marks[0]) for each in marks[1:]):
            raise Unknown("the ranks that are looked at hold values of different kinds")
        self._splits = list(self._found(captured))

    def at(self, coordinate: int) -> Tensor:
        """The elements that the rank there has."""
        if coordinate in self.held or not self._splits:
            return self.held.get(coordinate, self.held[0])
        found, first = self._symbols[0].clone(), self.held[0]
        for each in self._splits:
            found[each.places] = each.of(coordinate, self.size)
        return symbols.elements(found.reshape(first.shape), symbols.pieces(first)[1])

    def _found(self, captured: CapturedMachine) -> Iterator[_Split]:
        left = torch.stack([found != self._symbols[0] for found in self._symbols.values()]).any(0)
        while bool(left.any()):
            found = self._split(captured, left.nonzero().reshape(-1))
            left[found.places] = False
            yield found

    def _split(self, captured: CapturedMachine, places: Tensor) -> _Split:
        """A value of which the element at the first of these places is split, and all that are split likewise."""
        for value in captured.values_of(int(self._symbols[0][places[0]])):
            order = value.reshape(-1).argsort()
            at = torch.searchsorted(value.reshape(-1)[order], self._symbols[0][places]).clamp(max=value.numel() - 1)
            for dim in range(value.ndim):
                made = _Split(value.contiguous(), dim, order[at], places, self._symbols[max(self.held)][places])
                fits = torch.stack([made.of(k, self.size) == x[places] for k, x in self._symbols.items()]).all(0)
                if bool(fits[0]):
                    return _Split(made.value, dim, made.first[fits], places[fits], made.beyond[fits])
        raise Unknown("the ranks that are looked at hold no parts of one value")
