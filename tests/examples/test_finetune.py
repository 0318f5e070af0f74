"""The fine-tuning recipe has the numbers of plain torch on one device, also where it resumes in another mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import finetune
import gpt
import pytest
import torch
from torch import Tensor

import spmd

from ..harness.pool import Ranks

SMALL = gpt.Config(width=8, layers=1, heads=2, context=8, vocabulary=12)


def trained(rank: int, world: int, folder: Path, modes: tuple[spmd.ParallelMode | None, ...]) -> tuple[object, ...]:
    """The losses, and the whole state dict, of three updates in each mode, one after the other."""
    config = finetune.Config(folder, steps=6, rows=6, rank=2, model=SMALL, dtype=torch.float64)
    losses: list[float] = []
    for k, mode in enumerate(modes):
        recipe = finetune.Recipe(replace(config, mode=mode))
        if k:
            recipe.resume()
        recipe.train(3 * k + 3)
        losses += recipe.losses
    state: dict[str, Tensor] = spmd.state_dict(recipe.model)
    loss = recipe.evaluate(next(finetune.batches(config))[0])
    return [*losses, loss.item()], state


def test_the_recipe_has_the_numbers_of_one_device(ranks: Ranks, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, trained, tmp_path / "plain", (None, None))
    modes = (spmd.DataParallel("replicate", shard_optimizer=True), spmd.DataParallel("fully_shard"))
    for losses, state in ranks.run(2, trained, tmp_path / "ranks", modes):
        assert len(losses) == 7 and losses == pytest.approx(expected[0], rel=1e-9)
        torch.testing.assert_close(state, expected[1], rtol=1e-9, atol=1e-11)
