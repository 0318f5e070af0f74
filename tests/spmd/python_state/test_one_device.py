"""A step that asks for its place in the world is answered as on one device; so is the plain step that verifies it."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import get_world_size

import spmd
from spmd.python_state.reads.one_device import OwnRank
from tests.harness.fake import fake_world
from tests.harness.pool import Ranks

of_library = importlib.import_module("torch.distributed.distributed_c10d").get_world_size  # as a library keeps it


def by_its_module() -> int:
    return distributed.get_world_size()


def by_its_name() -> int:
    return get_world_size()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("ask", [by_its_module, by_its_name, of_library])
def test_a_factor_for_each_rank_is_one(ask: Callable[[], int]) -> None:
    """Loops for DDP divide counts by the number of ranks, or multiply losses by it."""

    @spmd.compile
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, int]:
        loss = model(x).square().sum() / (len(x) / ask())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, ask()

    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    with fake_world(2):
        verdict = spmd.verify(step, model, torch.optim.SGD(model.parameters(), 0.1), x, world=2)
        assert verdict, verdict
        assert step(model, torch.optim.SGD(model.parameters(), 0.1), x)[1] == 1
        assert ask() == get_world_size() == 2


def test_the_rank_in_a_step_says_who_logs_and_counts_from_zero() -> None:
    rank = OwnRank(3)
    assert rank == 3 and rank != 0 and rank and not rank < 3 and rank in (1, 3) and {rank: "a"}[3] == "a"
    assert f"{rank} {rank:02d} {rank!r} %d" % 1 == "3 03 3 1" and str(rank) == "3"
    assert 8 * rank == 0 and ["own", "other"][rank] == "own" and range(rank, rank + 2) == range(2)
    assert torch.equal(torch.arange(2) + 2 * rank, torch.arange(2))
    assert (rank == torch.arange(2)).tolist() == (torch.arange(2) == rank).tolist() == [True, False]
    assert pickle.loads(pickle.dumps(rank)) == 3 and type(copy.deepcopy(rank)) is int
    assert not OwnRank(0) and max(OwnRank(1), OwnRank(2)) == 2


def prints(rank: int, world: int) -> None:
    """A rank other than the first prints nothing, and each has the row of the one device."""

    @spmd.compile
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, int]:
        gathered = [model(x)]
        if distributed.get_rank() == 0:
            LOG.append(distributed.get_rank() + 1)
        NOTES["rank"] = distributed.get_rank()
        return gathered[distributed.get_rank()].sum(), distributed.get_rank()

    LOG.clear()
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    parts = torch.randn(world, 2, 3, dtype=torch.float64)
    found, own = step(model, torch.optim.SGD(model.parameters(), 0.1), parts[rank])
    torch.testing.assert_close(found, model(parts.flatten(0, 1)).sum())
    assert ([1] if rank == 0 else []) == LOG
    assert own == NOTES["rank"] == rank and type(own) is type(NOTES["rank"]) is int  # behind the step


LOG: list[int] = []
NOTES: dict[str, int] = {}


def logs_a_value(rank: int, world: int) -> None:
    @spmd.compile
    def step(x: Tensor) -> Tensor:
        if distributed.get_rank() == 0:
            LOG.append(x.sum().item())
        return x * 2

    message = "(?s)output the global LOG.*or return the value, and log it outside of the step"
    with pytest.raises(spmd.RankMismatchError, match=message):
        step(torch.ones(2))


def test_a_value_that_one_rank_alone_logs_is_refused(ranks: Ranks) -> None:
    ranks.run(2, logs_a_value)


def test_ranks_print_once_and_take_their_rows(ranks: Ranks) -> None:
    ranks.run(2, prints)
