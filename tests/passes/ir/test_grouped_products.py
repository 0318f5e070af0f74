"""``_grouped_mm`` without data: shapes, strides, gradients and refusals are those of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes._torch import FakeTensorMode
from passes.ir import infer_shapes as infer_shapes  # gives the op its shapes

ENDS = torch.tensor([2, 5, 5, 11], dtype=torch.int32)


def factors(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows and weights in both layouts; too few groups, other sizes, rows that overlap or do not start aligned."""

    def f(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)

    first = [f(11, 16), f(11, 16).t(), f(16, 11).t(), f(11, 32)[:, :16], f(1, 16).expand(11, 16), f(11, 5)]
    second = [f(4, 16, 24), f(4, 24, 16).mT, f(4, 5, 16).mT, f(11, 24), f(11, 16).t(), f(4, 12, 24), f(3, 16, 24)]
    return [*first, f(4, 24, 16), f(4, 16, 24).mT], [*second, f(16)]


def outcome(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor | None) -> Any:
    """Shape, strides and dtype of the result and of both gradients; or what is refused."""
    found = []
    try:
        result = torch._grouped_mm(first, second, offs=ends)  # type: ignore[attr-defined]
        found.append(result)
        found += torch.autograd.grad(result, (first, second), torch.ones_like(result))
    except RuntimeError:
        return [(each.shape, each.stride(), each.dtype) for each in found], "refused"
    return [(each.shape, each.stride(), each.dtype) for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_results_and_gradients_are_laid_out_as_the_kernels_do(dtype: torch.dtype) -> None:
    ran = 0
    rows, weights = factors(dtype)
    for first, second, ends in [(a, b, ends) for a in rows for b in weights for ends in (None, ENDS)]:
        real = outcome(first.detach().requires_grad_(), second.detach().requires_grad_(), ends)
        mode = FakeTensorMode()
        fakes = [mode.from_tensor(each.detach()).requires_grad_() for each in (first, second)]
        assert outcome(*fakes, ends if ends is None else mode.from_tensor(ends)) == real, (first.shape, second.shape)
        ran += isinstance(real, list)
    assert ran == (0 if dtype is torch.float64 else 9)


@pytest.mark.parametrize("change, message", [
    ({"first": torch.float64}, "float32, float16 or bfloat16 .* got torch.float64 and torch.float32"),
    ({"out_dtype": torch.bfloat16}, "results in torch.float32"),
    ({"offs": torch.int64}, "offs of 1 dim in int32 .* got 1 in torch.int64"),
])  # fmt: skip
def test_what_is_refused(change: dict[str, torch.dtype], message: str) -> None:
    first = torch.empty(11, 16, dtype=change.get("first"), device="meta")
    ends = torch.empty(4, dtype=change.get("offs", torch.int32), device="meta")
    with pytest.raises(RuntimeError, match=message):
        torch._grouped_mm(  # type: ignore[attr-defined]
            first, torch.empty(4, 16, 24, device="meta"), offs=ends, out_dtype=change.get("out_dtype")
        )
