"""Steps that ``spmd fuzz`` has found to fail, as it shrank them. Each agrees now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import spmd

pytestmark = pytest.mark.slow

Step = Callable[..., Any]


def line() -> nn.Module:
    return nn.Linear(4, 4)


def a_split_into_one_piece(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """A view of all rows, which is an item of a list."""
    for piece in x.split(3):
        loss = model(piece).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def one_number_in_a_narrow_dtype(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """The gradient of a single number is reduced in bfloat16, which is no error."""
    loss = (x * model.scale).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def an_empty_part(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Of a parameter with one element, one rank has all, and the other has nothing."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


FOUND: dict[Step, tuple[Callable[[], nn.Module], dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    a_split_into_one_piece: (line, {}, (3, 4), {"mesh": {"tp": 1}, "world": 1}),
    one_number_in_a_narrow_dtype: (Scale, {"reduce_dtype": torch.bfloat16}, (4, 4), {"world": 2}),
    an_empty_part: (
        nn.PReLU,
        {"params": {"model.weight": {"tp": Shard(0)}}},
        (4, 4),
        {"mesh": {"dp": 2, "tp": 2}, "world": 4},
    ),
}


@pytest.mark.parametrize("step", FOUND, ids=lambda step: str(step.__name__))
def test_what_was_found_agrees(step: Step) -> None:
    make, options, shape, ranks = FOUND[step]
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**options))
    verdict = spmd.verify(compiled, model, optimizer, torch.randn(shape), steps=1, **ranks)
    assert verdict, verdict
