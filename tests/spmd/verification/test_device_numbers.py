"""Programs whose numbers lie on the device are verified and certified as others are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import passes
import spmd
from passes import DeviceNumbers, Pass, Program

pytestmark = pytest.mark.slow
aten = torch.ops.aten


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    return model, optimizer, torch.rand(8, 4), torch.rand(8, 4)


@dataclass(frozen=True)
class Swapped(Pass):
    """Wrong: the first two numbers are read in each other's place."""

    def rewrite(self, program: Program) -> int:
        for node in program.graph.find_nodes(op="call_function", target=aten.select.int):
            if node.args[0].name == "floats" and node.args[2] < 2:
                node.update_arg(2, 1 - node.args[2])
        return 2


def compiled(*behind: Pass) -> Any:
    pipeline = passes.with_numbers_on_device(passes.default())
    at = next(k for k, each in enumerate(pipeline) if isinstance(each, DeviceNumbers)) + 1
    return spmd.compile(train_step, passes=[*pipeline[:at], *behind, *pipeline[at:]])


def test_a_program_with_numbers_on_the_device_is_shown() -> None:
    found = spmd.certify(compiled(), *arguments(), world=2)
    assert found, found


def test_numbers_in_each_others_place_are_found() -> None:
    step = compiled(Swapped())
    assert spmd.certify(step, *arguments(), world=2).outcome == "wrong"
    verdict = spmd.verify(compiled(Swapped()), *arguments(), world=2)
    assert not verdict and verdict.stage == "Swapped"


def test_a_program_with_numbers_on_the_device_is_verified() -> None:
    verdict = spmd.verify(compiled(), *arguments(), world=2)
    assert verdict, verdict
