"""What compiling costs grows with the number of layers, and no faster: counted in calls, not in seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spmd

from ...harness.cpu_time import count_calls
from ...harness.fake import fake_world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.layer(self.norm(x)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled(layers: int) -> Callable[[], object]:
    model = nn.Sequential(*(Block() for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    runner = spmd.compile(step, parallel_mode=spmd.DataParallel("fully_shard")).runner
    return lambda: runner.prepare(runner.read((model, optimizer, torch.zeros(2, 4)), {}))


@pytest.mark.usefixtures("alone")
def test_each_layer_costs_as_much_in_a_deep_model_as_in_a_flat_one() -> None:
    with fake_world(1024):
        compiled(1)()  # what is made once in a process
        few, some, many = (count_calls(compiled(layers)) for layers in (3, 5, 8))
    assert (many - some) / 3 == pytest.approx((some - few) / 2, rel=0.05)
