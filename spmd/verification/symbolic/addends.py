"""Addends of a sum that is still to be reduced, where ranks exchange parts of it: only all of them are the sum.

Such a value is named by the sum that its ranks have together (``symbols.py``). Where ranks exchange parts of it, to add
them themselves, each rank's addends get symbols of their own: any at all, but for the last rank's, which are what is
left of the sum. They are marked until what was computed from them is a value of the captured program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .. import symbols
from ..symbols import ADDEND


def split_addends(x: Tensor, bit: int, ranks: int, place: tuple[Any, ...]) -> list[Tensor]:
    """Split ``x`` into what each of ``ranks`` holds of it, the same elements on all: of a sum, its own addends.

    ``bit`` is the mark of a sum that these ranks have together. ``place`` names the value and where the ranks are:
    other values of the same sum may have other addends.
    """
    found, marks = symbols.pieces(x)
    numbers = torch.arange(found.numel()).reshape(found.shape)
    own = [symbols.hashed(symbols.key("addend", k, place), found, numbers) for k in range(ranks - 1)]
    own.append(reduce(symbols.minus, own, found))
    is_sum = marks & bit != 0
    left = torch.where(is_sum, marks & ~bit | ADDEND, marks)
    return [symbols.elements(torch.where(is_sum, each, found), left) for each in own]


def completed(x: Tensor, is_known: Callable[[Tensor], Tensor]) -> Tensor:
    """Elements without the mark where all addends were added up: ``is_known`` says what the captured program has."""
    found, marks = symbols.pieces(x)
    addends = marks & ADDEND != 0
    if not bool(addends.any()):
        return x
    return symbols.elements(found, torch.where(addends & is_known(found), marks & ~ADDEND, marks))


def summed(x: Tensor, dims: list[int], keepdim: bool) -> Tensor | None:
    """The sums of elements along one dim of which some are addends; None for any others, which are not computed."""
    found, marks = symbols.pieces(x)
    if len(dims) != 1 or keepdim or not bool((marks & ADDEND).any()):
        return None
    first = marks.select(dims[0], 0)
    unequal = (marks != first.unsqueeze(dims[0])).any(dims[0])
    return symbols.elements(symbols.total(found, dims[0]), first | ADDEND | unequal * symbols.UNKNOWN)
