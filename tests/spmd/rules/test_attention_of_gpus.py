"""Rules of the attention kernels of GPUs, each option run on parts, by kernels of the same signatures on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from passes.ir.ops import find
from spmd.rules.attention import has_form
from tests.harness.gpu_attention import CUDNN, EFFICIENT, FLASH, kernels_of_gpus

from .engine import Sample, check, options_of


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with kernels_of_gpus():
        yield


def samples(name: str, rows: int, heads: int, causal: bool, bias: bool = False) -> tuple[Sample, Sample]:
    """A call of a kernel, and that of its backward."""
    torch.manual_seed(0)
    query, grad = (torch.randn(2, 4, rows, 4, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(2, heads, rows, 4, dtype=torch.float64) for _ in range(2))
    added = [] if name == FLASH else [torch.randn(2, 1, rows, rows, dtype=torch.float64) if bias else None, True]
    args = (query, key, value, *added, 0.0, causal)
    forward, backward = find(name), find(f"{name}_backward")
    out, sums, *more = forward(*args)  # type: ignore[misc]
    held: tuple[Any, ...] = (grad, query, key, value)
    if name == EFFICIENT:
        held = (*held, added[0], out, sums, *more, 0.0, [True, True, True, bias], causal)
    elif name == FLASH:
        held = (*held, out, sums, *more[:4], 0.0, causal, *more[4:6])
    else:
        held = (*held, out, sums, *more[4:6], added[0], *more[:4], 0.0, causal)
    return Sample(forward, args), Sample(backward, held)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name, rows, heads", [(FLASH, 7, 2), (FLASH, 16, 2), (CUDNN, 16, 4), (EFFICIENT, 96, 4)])
def test_each_option_is_right_on_the_parts(name: str, rows: int, heads: int, causal: bool) -> None:
    for sample in samples(name, rows, heads, causal):
        for ranks in (2, 3):
            assert check(sample, ranks)


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
def test_rows_of_a_bias(name: str) -> None:
    """A ring reads its columns, but finds no gradient of it."""
    for sample in samples(name, 32, 4, causal=False, bias=True):
        assert check(sample, 2)
        assert any(has_form(option, "gather") for option in options_of(sample, 2))
        has_gradient = sample.op is find(f"{EFFICIENT}_backward")
        assert any(has_form(option, "ring") for option in options_of(sample, 2)) != has_gradient


@pytest.mark.parametrize("name, rows", [(FLASH, 16), (CUDNN, 16), (EFFICIENT, 32), (EFFICIENT, 16)])
def test_all_forms_but_where_a_log_sum_exp_is_padded(name: str, rows: int) -> None:
    for sample in samples(name, rows, 4, causal=True):
        found = options_of(sample, 2)
        forms = {form for form in ("gather", "ring", "heads") for option in found if has_form(option, form)}
        assert forms == ({"gather", "ring", "heads"} if rows % 32 == 0 or name != EFFICIENT else {"heads"})


def test_without_gradients_no_log_sum_exp_is_kept() -> None:
    sample, _ = samples(EFFICIENT, 16, 4, causal=True)
    assert check(Sample(sample.op, (*sample.args[:4], False, *sample.args[5:])), 2)
