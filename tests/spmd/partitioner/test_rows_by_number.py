"""Rows taken by their number (``x[torch.arange(len(x)), last]``) are each rank's own: exact, and without a gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import make_optimizer
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts

ROWS, LENGTH, WIDTH = 3, 5, 8


@dataclass(frozen=True)
class LastWord(Case):
    """Classify each row by its last word; a mask and a one-hot target are written by row number, too."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Linear(WIDTH, WIDTH).double()
        return model, make_optimizer("SGD", model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=random, dtype=torch.float64)
        last = torch.randint(0, LENGTH, (ROWS,), generator=random)
        return x, last, torch.randint(0, WIDTH, (ROWS,), generator=random)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, last: Tensor, y: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        hidden = model(x).tanh()
        mask = (x[..., 0] > 0)[rows[:, None], torch.arange(LENGTH)]
        target = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        target[rows, y] = 1
        loss = (hidden[rows, last] - target).square().sum() + (hidden * mask[..., None]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def test_rows_by_number_are_exact(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, LastWord(), "fully_shard", steps=3)


def test_rows_by_number_are_not_gathered() -> None:
    case = LastWord()
    mode = spmd.DataParallel("replicate")
    compiled = compile_on_fake_ranks(8, case.step, case.build(), *case.part(0, 0), parallel_mode=mode)
    assert set(counts(compiled)) == {"all_reduce"}
