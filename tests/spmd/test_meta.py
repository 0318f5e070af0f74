"""The meta of real programs, from partition to lowering: every key is declared and has a value of the declared type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import passes
import spmd
from passes.ir.meta import DECLARED
from tests.harness.fake import fake_world


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass(frozen=True)
class Inspect(passes.Pass):
    """Changes nothing."""

    keeps_order: ClassVar[bool] = True

    def rewrite(self, program: passes.Program) -> int:
        for node in program.graph.nodes:
            wrong = {key: each for key, each in node.meta.items() if not isinstance(each, DECLARED[key].type)}
            assert not wrong, f"{node.name}: {wrong}"
        return 0


def test_types() -> None:
    pipeline = [passes.Realise(backend="gloo") if isinstance(p, passes.Realise) else p for p in passes.default()]
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 3))
        optimizer = torch.optim.Adam(model.parameters())
        inspected = [Inspect(), *pipeline, Inspect()]
        step = spmd.compile(train, parallel_mode=spmd.DataParallel("fully_shard"), passes=inspected)
        for _ in range(2):
            step(model, optimizer, torch.ones(4, 4))
