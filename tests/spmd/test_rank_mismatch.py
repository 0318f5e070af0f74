"""Ranks that are about to compile different programs raise, all of them, and go on afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 17, 4), rows=6, optimizer="AdamW")


def with_flag(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, flag: bool) -> Tensor:
    loss = F.mse_loss(model(x), y) if flag else F.l1_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def other_batch(rank: int, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x[rank:], y[rank:], True


def other_flag(rank: int, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x, y, rank == 0


def other_dtype(rank: int, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x, y.float() if rank else y, True


def mismatch(rank: int, world: int, disagree: Any) -> None:
    """A call that the ranks make differently, a good one."""
    objects = CASE.build()
    step = spmd.compile(with_flag)
    with pytest.raises(spmd.RankMismatchError):
        step(*objects, *disagree(rank, *CASE.part(rank, 3)))
    assert torch.isfinite(step(*objects, *CASE.part(rank, 4), True))


@pytest.mark.parametrize("disagree", [other_batch, other_flag, other_dtype], ids=lambda function: function.__name__)
def test_ranks_that_disagree_raise_together(ranks: Ranks, disagree: Any) -> None:
    ranks.run(2, mismatch, disagree, timeout=15, grace=3)


def other_model(rank: int, world: int) -> None:
    sizes = (15, 17 + rank, 4)
    case = MLP(sizes=sizes, rows=6)
    with pytest.raises(spmd.RankMismatchError):
        spmd.compile(case.step)(*case.build(), *case.part(rank, 0))


def test_ranks_with_different_models_raise_together(ranks: Ranks) -> None:
    ranks.run(2, other_model, timeout=15, grace=3)


def one_fails(rank: int, world: int) -> None:
    """Rank 1's own transformation fails: rank 0 is told, and both can go on."""

    def transformation(gm: Any) -> Any:
        if rank == 1:
            raise ValueError("not on this rank")
        return gm

    objects = CASE.build()
    with pytest.raises(ValueError if rank else spmd.RankMismatchError, match="not on this rank"):
        spmd.compile(None, transformation)(CASE.step)(*objects, *CASE.part(rank, 0))
    assert torch.isfinite(spmd.compile(CASE.step)(*objects, *CASE.part(rank, 1)))


def test_a_rank_that_fails_to_compile_tells_the_others(ranks: Ranks) -> None:
    ranks.run(2, one_fails, timeout=15, grace=3)


def unequal_rows(rank: int, world: int) -> None:
    with pytest.raises(spmd.RankMismatchError):
        spmd.compile(lambda x: x.sum())(torch.ones(4 + rank, 3))


def test_batches_of_unequal_size_are_refused(ranks: Ranks) -> None:
    ranks.run(2, unequal_rows, timeout=15, grace=3)
