"""Parameters and buffers are made equal to rank 0's before the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from tests.harness.cases import MLP, STYLES_ON_RANKS, make_optimizer, mlp
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class RandomStart(MLP):
    """Parameters and a buffer drawn from the default generator; one parameter is frozen."""

    sizes: tuple[int, ...] = (15, 17, 4)
    rows: int = 6

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(mlp(*self.sizes), nn.BatchNorm1d(4).double())
        torch.nn.init.normal_(model[1].running_mean)
        model[0][0].bias.requires_grad_(False)
        return model, make_optimizer(self.optimizer, model.parameters())


def run(rank: int, world: int, style: str) -> list[str]:
    case = RandomStart()
    _, got = compiled_run(rank, case, 5, seed=100 * rank, parallel_mode=spmd.DataParallel(style))
    return all_unequal(plain_run(case, world, 5), got, rank, world)


@pytest.mark.parametrize("style, world", STYLES_ON_RANKS)
def test_every_rank_starts_with_the_state_of_rank_zero(ranks: Ranks, world: int, style: str) -> None:
    assert ranks.run(world, run, style) == [[]] * world
