"""What an op is taken found into computes what the op does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from passes import Mesh
from passes.ir.ops import find
from spmd.rules import Info, OpCall, decomposition_of

DTYPES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def both(name: str, *args: Any) -> tuple[Tensor, Tensor]:
    """(the result of the op, the result of its decomposition)."""
    op: Any = find(name)
    infos = tuple(Info(tuple(a.shape), a.dtype) if isinstance(a, Tensor) else a for a in args)
    found = decomposition_of(
        OpCall(op, infos, {}, tuple(i for i in infos if isinstance(i, Info)), (), len(Mesh().axes))
    )
    assert found is not None
    assert found[0] == args[-2] % args[0].ndim
    return op(*args), found[1](*args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax(name: str, dim: int, dtype: torch.dtype) -> None:
    x = (20 * torch.randn(5, 7, dtype=torch.float64)).to(dtype)
    x[0, 0] = -torch.inf
    expected, got = both(name, x, dim, False)
    torch.testing.assert_close(got, expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    expected, got = both(f"{name}_backward_data", torch.randn(5, 7).to(dtype), expected, dim, dtype)
    torch.testing.assert_close(got, expected, rtol=DTYPES[dtype], atol=4 * DTYPES[dtype], equal_nan=True)
