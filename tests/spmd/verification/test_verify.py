"""``spmd.verify``: clean steps agree, and nothing of the user's changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import spmd


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(rows: int = 8, optimizer: str = "Adam", dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3)).to(dtype)
    x, y = torch.randn(rows, 6, dtype=dtype), torch.randn(rows, 3, dtype=dtype)
    return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1), x, y


TENSOR = {"*.0.weight": {"tp": Shard(0)}, "*.0.bias": {"tp": Shard(0)}}
CLEAN: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "replicate": ({}, {}, {"world": 2}),
    "fully_shard, odd rows, three ranks": ({"parallel_style": "fully_shard"}, {"rows": 7}, {"world": 3}),
    "hybrid": ({"parallel_style": "fully_shard"}, {"optimizer": "SGD"}, {"mesh": {"replicate": 2, "shard": 2}}),
    "tensor parallel": ({"params": TENSOR}, {}, {"mesh": {"dp": 2, "tp": 2}}),
    "kept by two ranks": ({"parallel_style": "fully_shard", "reshard_after_forward": 2}, {}, {}),
    "ZeRO 1, float32": ({"shard_optimizer": True}, {"dtype": torch.float32}, {"world": 2}),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_step_agrees(name: str) -> None:
    mode, given, options = CLEAN[name]
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel(**mode))
    verdict = spmd.verify(step, *arguments(**given), steps=2, **options)
    assert verdict, verdict
    assert verdict.compared >= 20


def test_nothing_of_the_users_changes() -> None:
    step = spmd.compile(train_step, parallel_mode=spmd.DataParallel("fully_shard"))
    given = arguments()
    before = copy.deepcopy((given[0].state_dict(), given[1].state_dict(), given[2:]))
    state, world = torch.get_rng_state(), dist.group.WORLD
    assert spmd.verify(step, *given, steps=1, world=2)
    after = (given[0].state_dict(), given[1].state_dict(), given[2:])
    for one, other in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert torch.equal(torch.get_rng_state(), state) and dist.group.WORLD is world
    assert step.programs == ()
