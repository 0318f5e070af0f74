"""Plans of a step with experts: what a rank keeps and sends of them, and a mode that runs as it is pasted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import spmd
from passes import Phase
from spmd.planning.capture import partitioned
from spmd.planning.search import search
from spmd.planning.step_work import CapturedStep
from spmd.verification.world import simulated_world

pytestmark = pytest.mark.slow

WIDTH, COUNT = 16, 4


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, COUNT)
        self.up = nn.Parameter(torch.empty(COUNT, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        experts, order = chosen.flatten().sort()
        ends = experts.bincount(minlength=COUNT).cumsum(0).int()
        made = torch._grouped_mm(x[order // 2].bfloat16(), self.up.bfloat16(), offs=ends)  # type: ignore[attr-defined]
        return x + torch.zeros_like(x).index_add(0, order // 2, made * weights.flatten()[order, None])


@spmd.compile
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(rows: int) -> tuple[Any, ...]:
    with torch.device("meta"):
        model = nn.Sequential(*(Mixture() for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)


def test_experts_stay_where_they_are_and_tokens_go_to_them() -> None:
    step = CapturedStep(train_step, arguments(32), {})
    (block,) = [each for each in step.of(1, 2).work.plain if each.count == 4]
    assert block.expert_parameters == COUNT / 2 * WIDTH * WIDTH
    assert any(each.to_experts for each in block.messages[Phase.FORWARD])
    found = search(step, 2, "H100", 8, None, None, 100)
    chosen = next(each for each in found.layouts if each.layout.experts == 2)
    made: dict[str, Any] = {"spmd": spmd, "init_device_mesh": init_device_mesh, "step": train_step.function}
    with simulated_world(2, None, "cpu"):
        exec(found.python(chosen).replace('"cuda"', '"cpu"'), made)
        program = partitioned(made["step"], lambda _: made["mode"], arguments(16), {}, {"dp": 2})
    assert [axis.name for axis in program.mesh.axes] == ["dp", "ep"]
