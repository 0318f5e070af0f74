"""Checks that raise where a tensor has a False: each call makes them, also in micro-batches, on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd

LIMIT = 3.0


def of_a_condition(x: Tensor) -> None:
    torch._check_tensor_all(x.abs().sum() < LIMIT, lambda: f"too much: {x.sum()}")


def with_values(x: Tensor) -> None:
    total = x.abs().sum()
    torch._assert_async(total < LIMIT, f"too much: {total} of {LIMIT}, {total!s}")


def of_elements(x: Tensor) -> None:
    torch._check_tensor_all(x.sum(0) < LIMIT)


def step(model: nn.Module, x: Tensor, check: Any) -> Tensor:
    check(x)
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("check", "says"),
    [
        (of_a_condition, r"too much: \(a value\) \(test_tensor_checks\.py:\d+: torch\._check_tensor_all"),
        (with_values, r"too much: \(a value\) of 3\.0"),
        (of_elements, r"expected all elements .* \(test_tensor_checks\.py"),
    ],
)
def test_a_check_is_made_in_each_call(check: Any, says: str, count: int) -> None:
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(micro_batches=count))
    model, x = nn.Linear(1, 1), torch.ones(6, 1) / 4
    compiled(model, x, check)
    with pytest.raises(RuntimeError, match=says):
        compiled(model, 3 * x, check)


@pytest.mark.usefixtures("alone")
def test_other_text_of_values_is_refused() -> None:
    def tells(x: Tensor) -> list[str]:
        return [f"{x.sum()}"]

    with pytest.raises(spmd.CaptureError, match="formats the value of a tensor as text"):
        spmd.compile(tells)(torch.ones(2))
