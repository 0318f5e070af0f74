"""A small recommender, as DLRM: dense features through an MLP, ids through large tables, interactions by products.

Ids come one to a table, or several to a table, padded to the longest. The tables are most of the model, so they may be
split by rows over the ranks, and the rest is replicated (``DTensorExpand``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks

from .examine import assert_trains_in_place, in_one_style
from .zoo import ROWS

DENSE, WIDTH, LONGEST = 6, 4, 3
SINGLE, SEVERAL = (32, 48), (64, 24)  # rows of the tables


class Recommender(nn.Module):
    """Scores of one user and item each."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.ReLU())
        self.single = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in SINGLE)
        self.several = nn.ModuleList(
            nn.EmbeddingBag(rows, WIDTH, mode=mode, padding_idx=0)
            for rows, mode in zip(SEVERAL, ("sum", "mean"), strict=True)
        )
        pairs = 5 * 4 // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, single: Tensor, several: Tensor) -> Tensor:
        low = self.bottom(dense)
        looked_up = [table(single[:, k]) for k, table in enumerate(self.single)]
        bags = [table(several[:, k]) for k, table in enumerate(self.several)]
        features = torch.stack([low, *looked_up, *bags], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        one, other = torch.tril_indices(5, 5, offset=-1)
        return self.top(torch.cat([low, products[:, one, other]], dim=1)).squeeze(1)


@dataclass(frozen=True)
class Clicks(MLP):
    """Predict clicks; Adagrad, as for sparse ids."""

    rows: int = ROWS

    def build(self) -> tuple[Any, ...]:
        model = Recommender().double()
        return model, torch.optim.Adagrad(model.parameters(), lr=0.05)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        dense = torch.randn(self.rows, DENSE, generator=random, dtype=torch.float64)
        single = torch.stack([torch.randint(n, (self.rows,), generator=random) for n in SINGLE], dim=1)
        several = torch.stack([torch.randint(n, (self.rows, LONGEST), generator=random) for n in SEVERAL], dim=1)
        lengths = torch.randint(1, LONGEST + 1, (self.rows, len(SEVERAL), 1), generator=random)
        several = several.masked_fill(torch.arange(LONGEST) >= lengths, 0)
        return dense, single, several, torch.randint(2, (self.rows,), generator=random).double()

    @staticmethod
    def step(model: nn.Module, optimizer: Any, dense: Tensor, single: Tensor, several: Tensor, clicks: Tensor) -> Any:
        score = model(dense, single, several)
        loss = F.binary_cross_entropy_with_logits(score, clicks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, score


def test_a_recommender(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    for style in in_one_style(request, "fully_shard"):
        assert_trains_in_place(ranks, Clicks(), style)


def with_split_tables(rank: int, world: int) -> tuple[list[str], set[str]]:
    """The differences from one process, and the parameters of which a rank has a part."""
    case = Clicks()
    mode = spmd.DTensorExpand(params={"model.s*.weight": Shard(0)})
    compiled, got = compiled_run(rank, case, 3, parallel_mode=mode)
    assert compiled.program is not None
    inputs = [declared for declared, _ in compiled.program.values().values()]
    split = {i.name for i in inputs if i.role == "parameter" and i.placement == (Shard(0),)}
    return all_unequal(plain_run(case, world, 3), got, rank, world), split


def test_a_recommender_whose_tables_are_split(ranks: Ranks) -> None:
    tables = {f"model.{kind}.{k}.weight" for kind in ("single", "several") for k in range(2)}
    assert ranks.run(2, with_split_tables) == [([], tables)] * 2
