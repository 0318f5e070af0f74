"""A model whose parameters exceed the memory that a rank may have trains, from the meta device."""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import Block
from tests.harness.memory import allocate_without_holes
from tests.harness.pool import Ranks

WIDTH, BLOCKS, RANKS = 1536, 7, 4
WHOLE = 4 * BLOCKS * (8 * WIDTH * WIDTH + 5 * WIDTH)  # bytes of all parameters
LIMIT = WHOLE * 9 // 10  # beyond what the process has when it begins
MODE = spmd.DataParallel("fully_shard", reshard_after_forward=True, prefetch=(0, 0))  # one unit at a time


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def private_bytes() -> int:
    """The private memory that counts for ``ulimit -d`` (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def settled_bytes() -> int:
    """As ``private_bytes``, once the threads of groups that are gone have ended: each has a stack of some megabytes."""
    gc.collect()
    found, now = -1, private_bytes()
    while found != now:
        time.sleep(1.0)
        found, now = now, private_bytes()
    return now


def train(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    allocate_without_holes()
    small = nn.Sequential(Block(8))  # what torch loads for a first compile is not what is measured
    spmd.compile(step, parallel_mode=MODE)(small, torch.optim.SGD(small.parameters(), lr=0.1), torch.ones(2, 8))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (settled_bytes() + LIMIT, before[1]))
    try:
        with pytest.raises(RuntimeError, match=r"not enough memory|can't allocate"):
            torch.ones(WHOLE // 4)
        with torch.device("meta"):
            model = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compiled = spmd.compile(step, parallel_mode=MODE)
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
        return [float(compiled(model, optimizer, x)) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.slow
def test_it_trains_in_less_memory_than_its_parameters_take() -> None:
    """On ranks of their own: those of the pool may give back at any time what earlier tests have left with them."""
    ranks = Ranks()
    try:
        first, *others = ranks.run(RANKS, train)
    finally:
        ranks.close()
    assert others == [first] * (RANKS - 1)
    assert first[0] > first[1] > 0, first
