"""A warning of a compilation is given once, by the first rank that has it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.pool import Ranks


def train(model: nn.Module, optimizer: Any, x: Tensor, table: Tensor) -> Tensor:
    loss = ((model(x) - table) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def warned(rank: int, world: int, without: tuple[int, ...], folder: Path) -> list[str]:
    """The warnings of a step that ranks ``without`` cannot keep for later processes."""
    torch.manual_seed(0)
    model, table = nn.Linear(4, 4), torch.rand(4, 4)
    cache = folder / "file" if rank in without else folder / f"rank-{rank}"
    step = spmd.compile(train, parallel_mode="fully_shard", cache=cache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.rand(4, 4), table)
    assert all(each.filename == __file__ for each in caught)
    return ["cache" if "compiled steps are not kept" in str(each.message) else "batch" for each in caught]


@pytest.mark.parametrize("without, warnings_of", [((0, 1), [1, 0]), ((1,), [0, 1])])
def test_a_warning_is_given_by_the_first_rank_that_has_it(
    ranks: Ranks, without: tuple[int, ...], warnings_of: list[int], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    found = ranks.run(2, warned, without, tmp_path)
    assert [each.count("cache") for each in found] == warnings_of
    assert [each.count("batch") for each in found] == [1, 0]
