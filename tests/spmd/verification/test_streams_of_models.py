"""The checker finds no race where there is none: batch norms, dropout and clipping, attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import passes
import spmd
from passes import Program
from passes.schedule.happens_before import check_streams
from passes.schedule.streams import Launch, assign_streams
from tests.harness.fake import fake_world
from tests.harness.on_cuda import OnCuda
from tests.spmd.annotations.test_offload import Seen

pytestmark = pytest.mark.slow


class Attention(nn.Module):
    """One head over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.embed(x))).chunk(3, -1)
        return self.head((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).mean(1))


def convolutions() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    return model, torch.zeros(4, 3, 4, 4)


def dropout() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(4, 8)


def attention() -> tuple[nn.Module, Tensor]:
    return Attention(), torch.zeros(4, 5, dtype=torch.long)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Also clips by the global norm."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("build, offload", [
    (convolutions, None), (dropout, spmd.OffloadPolicy()), (attention, None), (attention, spmd.OffloadPolicy()),
])  # fmt: skip
def test_models_are_free_of_races(build: Any, offload: spmd.OffloadPolicy | None) -> None:
    seen: list[Program] = []
    model, x = build()
    with fake_world(4), pytest.raises(spmd.PassError, match="seen"):
        mode = OnCuda("fully_shard", offload_policy=offload)
        compiled = spmd.compile(step, parallel_mode=mode, passes=[*passes.default(), Seen(seen)])
        compiled(model, torch.optim.SGD(model.parameters(), 0.1), x, torch.zeros(4, dtype=torch.long))
    streams = assign_streams(seen[0])
    check_streams(seen[0], streams)
    assert sum(isinstance(each, Launch) for each in streams.operations) > 30
