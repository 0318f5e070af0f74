"""Arguments that an earlier program did not read, and numbers in Python's own arithmetic: the values of each call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import spmd

pytestmark = pytest.mark.usefixtures("alone")
X = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2)


def scaled_later(x: Tensor, flag: int, rate: Any) -> Tensor:
    return x * rate if flag and isinstance(rate, float) else x * 1


def named_later(x: Tensor, flag: int, name: Any) -> Tensor:
    return x * len(name) if flag else x * 1


def caught(x: Tensor, flag: int, name: Any) -> Tensor:
    try:
        number = int(name)
    except (TypeError, ValueError):
        number = 0
    return x * (number + 1)


def divided(x: Tensor, flag: int, number: Any) -> Tensor:
    return x * (number // 0.1) + 0.7 // number


@pytest.mark.parametrize("function, values", [
    (scaled_later, [(0, 0.5), (1, 0.5), (1, 0.7), (0, 0.9)]),
    (named_later, [(0, "a"), (0, "bb"), (1, "ccc"), (1, "dd")]),
    (caught, [(0, "a"), (0, "b"), (0, "5")]),
    (divided, [(0, 1.0), (0, -1.5), (0, 0.3)]),
])  # fmt: skip
def test_each_call_reads_its_values(function: Callable[..., Tensor], values: list[tuple[Any, ...]]) -> None:
    step = spmd.compile(function)
    for given in values:
        torch.testing.assert_close(step(X, *given), function(X, *given), rtol=1e-15, atol=0)


def iterated(mask: Tensor) -> None:
    for row, count in zip(mask, [1, 2, 0, 1], strict=True):
        row[:count] = 1


def in_parts(mask: Tensor) -> None:
    mask.split(2)[0].fill_(1)


def unbound(mask: Tensor) -> None:
    mask.unbind(0)[2].fill_(1)


@pytest.mark.parametrize("write", [iterated, in_parts, unbound])
def test_writes_through_one_of_several_views_are_in_a_constant_mask(write: Callable[[Tensor], None]) -> None:
    def masked(x: Tensor) -> Tensor:
        mask = torch.zeros(4, 2)
        write(mask)
        return x[mask > 0].sum()

    assert torch.equal(spmd.compile(masked)(X), masked(X))


def test_an_error_of_math_is_the_users() -> None:
    with pytest.raises(ValueError, match="math domain error"):
        spmd.compile(lambda x: x * math.sqrt(-1.0))(X)


def test_a_live_drop_rate_is_that_of_fp32() -> None:
    step = spmd.compile(lambda x, p: F.dropout(x, p))
    ones = torch.ones(500_000, dtype=torch.bfloat16)
    dropped = [(step(ones, p) == 0).double().mean().item() for p in (0.001, 0.002)]
    assert dropped == pytest.approx([0.001, 0.002], rel=0.2)  # six deviations of 500,000 draws


class Holder:
    """A tensor, and a view of it that the step reads as another."""

    def __init__(self) -> None:
        self.all = torch.zeros(2, dtype=torch.float64)
        self.first = self.all[:1]


def test_a_constant_that_shares_memory_with_what_is_written_is_refused() -> None:
    holder = Holder()

    def step(x: Tensor) -> Tensor:
        holder.all.add_(1)
        return x + holder.first

    with pytest.raises(spmd.CaptureError, match="share memory"):
        spmd.compile(step)(X)
    assert holder.all.tolist() == [0, 0]
