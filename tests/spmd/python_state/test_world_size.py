"""A step that asks for the number of ranks is answered as on one device; so is the plain step that verifies it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import get_world_size

import spmd
from tests.harness.fake import fake_world

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
