"""Recipes: which parameters ranks along a tensor axis split, and how, of models whose best division is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spmd
from benchmarks.anchors.models import Dims, Model
from benchmarks.anchors.models import train_step as step
from spmd.planning.step_work import recipe_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("arch", ["gpt", "llama"])
def test_blocks_are_divided_by_columns_then_rows(arch: str) -> None:
    with torch.device("meta"):
        model = Model(Dims(arch, 1024, 4096, 8, 8, 128, 8192, 512)).bfloat16()
    text: Any = torch.empty(4, 512, dtype=torch.long)
    _, found, _ = recipe_of(spmd.compile(step), (model, text, text), {})
    widens = ["mlp.up", "mlp.gate"] if arch == "llama" else ["mlp.up"]
    for name in ["attention.qkv", *widens]:
        assert _dim(found, f"{name}.weight") == 0, found
        assert arch == "llama" or _dim(found, f"{name}.bias") == 0
    assert [_dim(found, f"{name}.weight") for name in ("attention.out", "mlp.down")] == [1, 1]
    assert _dim(found, "head.weight") == 0
    assert not any("norm" in name for name in found)


def _dim(found: dict[str, int], name: str) -> int | None:
    """The dim of a parameter of the last block."""
    return next((dim for pattern, dim in found.items() if pattern.endswith(name)), None)
