"""``embedding_bag``: every mode, bags of equal and of unequal lengths, weights, padding; tables split by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks

TABLE, WIDTH, BAGS, LENGTH = 16, 3, 4, 3


@dataclass(frozen=True)
class Bags(MLP):
    """(bag, id) ids, which are the batch's, and flat ones in bags that every rank knows, some of them empty."""

    def build(self) -> tuple[Any, ...]:
        tables = nn.ParameterDict({name: torch.randn(TABLE, WIDTH) for name in ("padded", "flat")}).double()
        return tables, torch.optim.SGD(tables.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> dict[str, Any]:
        random, shared = random_generator(rank, step), random_generator(99, step)
        ends = torch.randint(0, 2 * BAGS * LENGTH, (2 * BAGS,), generator=shared).sort().values
        return {
            "padded": torch.randint(TABLE, (BAGS, LENGTH), generator=random),
            "flat": torch.randint(TABLE, (BAGS * LENGTH,), generator=random),
            "offsets": torch.cat([torch.zeros(1, dtype=torch.long), ends]),
            "weights": torch.rand(BAGS, LENGTH, generator=random, dtype=torch.float64),
        }

    def whole(self, parts: list[Any]) -> Any:
        """The offsets are the same on every rank."""
        return {**super().whole(parts), "offsets": parts[0]["offsets"]}

    @staticmethod
    def step(
        tables: nn.ParameterDict, optimizer: Any, padded: Tensor, flat: Tensor, offsets: Tensor, weights: Tensor
    ) -> Any:
        weights = weights.clone().requires_grad_()
        of_rows = [
            F.embedding_bag(padded, tables["padded"], mode="sum", per_sample_weights=weights),
            F.embedding_bag(padded, tables["padded"], mode="mean", padding_idx=2),
            F.embedding_bag(padded, tables["padded"], mode="max", padding_idx=2),
        ]
        of_bags = [
            F.embedding_bag(flat, tables["flat"], offsets, mode="mean", padding_idx=1),
            F.embedding_bag(flat, tables["flat"], offsets, include_last_offset=True, mode="sum"),
        ]
        loss = torch.stack([bag.square().sum() for bag in (*of_rows, *of_bags)]).sum() / 100
        (of_weights,) = torch.autograd.grad(loss, weights, retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, of_rows, of_bags, of_weights


def differ(rank: int, world: int, tables: str) -> list[str]:
    """What differs from one process; ``tables``: whole, or split by rows."""
    placements = {"tables.*": Shard(0) if tables == "split" else Replicate()}
    mode = spmd.DTensorExpand(params=placements, inputs={"offsets": Replicate(), "flat": Shard(0)})
    _, got = compiled_run(rank, Bags(), 2, parallel_mode=mode)
    return all_unequal(plain_run(Bags(), world, 2), got, rank, world)


def test_embedding_bags_agree_on_two_ranks(ranks: Ranks) -> None:
    assert ranks.run(2, differ, "whole") == [[], []]
    assert ranks.run(2, differ, "split") == [[], []]
