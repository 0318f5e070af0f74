"""Ops that seem to reach the rows of other ranks, and never do: each row looks up, pools or weighs its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.cases import MLP
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

from .examine import assert_trains_in_place
from .zoo import ROWS

LENGTH, WIDTH = 3, 4


class Lookups(nn.Module):
    """Indices that count along the batch, in every position that indexing allows."""

    def forward(self, x: Tensor, chosen: Tensor, several: Tensor) -> list[Tensor]:
        """``x``: (row, LENGTH, WIDTH), ``chosen``: (row,), ``several``: (row, 2)."""
        row = torch.arange(len(x))
        written, added = torch.zeros_like(x), torch.ones_like(x)
        written[row, chosen] = 2 * x[row, chosen]
        added.index_put_((row[:, None], several), x[row[:, None], several].cos(), accumulate=True)
        masked = F.pad(x, (0, 0, 0, 1))[row[:, None, None], torch.arange(LENGTH)[None, :, None], several[:, None] + 1]
        return [
            x[row, -1 - chosen],
            x[row, :, chosen],
            x[row[:, None], several, several + 1],
            x[row[:, None], torch.arange(LENGTH)],
            torch.stack([written, added]),
            masked,
        ]


@dataclass(frozen=True)
class OwnRows(MLP):
    """A layer with a weight norm, a pool that restrides its result, and lookups."""

    rows: int = ROWS

    def build(self) -> tuple[Any, ...]:
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        model = nn.ModuleDict({"layer": layer, "pool": nn.AdaptiveAvgPool1d(1), "lookups": Lookups()}).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        x = torch.randn(self.rows, LENGTH, WIDTH, generator=random, dtype=torch.float64)
        return x, *(torch.randint(LENGTH, (self.rows, *more), generator=random) for more in ((), (2,)))

    @staticmethod
    def step(model: nn.ModuleDict, optimizer: Any, x: Tensor, chosen: Tensor, several: Tensor) -> Any:
        h = torch.cat([torch.tensor([], dtype=x.dtype), model["layer"](x)], dim=-2)  # as a cache of keys begins
        pooled = model["pool"](h.transpose(1, 2)).flatten(1)
        found = [pooled, *model["lookups"](h.sin(), chosen, several)]
        loss = torch.stack([term.square().mean() for term in found]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, found


def test_each_row_looks_up_its_own(ranks: Ranks) -> None:
    assert_trains_in_place(ranks, OwnRows(), "fully_shard")


@dataclass(frozen=True)
class TwoViews(OwnRows):
    """Contrastive learning: two views of each row go through the model at once, with a batch norm over both."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, WIDTH)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(self.rows, WIDTH, generator=random, dtype=torch.float64) for _ in range(2))

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        one, other = model(torch.cat([x, y])).chunk(2)
        loss = -F.cosine_similarity(one, other.detach()).mean() + (one + other).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def test_two_views_of_each_row_stay_with_their_rank(ranks: Ranks) -> None:
    assert_trains_in_place(ranks, TwoViews(), "fully_shard")
