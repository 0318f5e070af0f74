"""Time and batch flattened to one dim, as recurrent layers and attention do: rows stay where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import assert_agrees, random_generator
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts

pytestmark = pytest.mark.slow

F64 = torch.float64
WIDTH = 8


class Attention(nn.Module):
    """Self-attention, with the batch first or second."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.inner(x, x, x)[0]
        return attended


LAYERS: dict[str, Any] = {
    "linear": lambda first: nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, WIDTH)),
    "attention": Attention,
    "encoder": lambda first: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=first),
    "LSTM": lambda first: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=first),
    "GRU": lambda first: nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=first),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    loss = F.mse_loss(out[0] if isinstance(out, tuple) else out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.in_turn("batch_first")
def test_only_gradients_and_the_loss_are_communicated(layer: str, batch_first: bool) -> None:
    model = LAYERS[layer](batch_first).to(F64)
    x = torch.randn((3, 2, WIDTH) if batch_first else (2, 3, WIDTH), dtype=F64)
    mode = spmd.DataParallel(input_batch_dim=0 if batch_first else 1)
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = compile_on_fake_ranks(4, step, objects, x, x, parallel_mode=mode, passes=())
    assert counts(compiled) == {"all_reduce": len(list(model.parameters())) + 1}


@dataclass(frozen=True)
class TimeFirst(MLP):
    """Everything at once, on tensors (time, batch, width)."""

    def build(self) -> tuple[Any, ...]:
        layers = [LAYERS[name](False) for name in ("linear", "attention")]
        model = nn.Sequential(*layers, nn.LSTM(WIDTH, WIDTH)).to(F64)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(2, 3, WIDTH, generator=random, dtype=F64) for _ in range(2))

    def whole(self, parts: list[Any]) -> Any:
        return tree_map(lambda *leaves: torch.cat(leaves, 1), *parts)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return step(model, optimizer, x, y)


@pytest.mark.parametrize(
    "world, style",
    [
        (2, "fully_shard"),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((2, "replicate"), (3, "fully_shard"))),
    ],
)
def test_time_first_agrees_with_the_plain_step(ranks: Ranks, world: int, style: str) -> None:
    assert_agrees(ranks, world, TimeFirst(), {"parallel_style": style, "input_batch_dim": 1})


@dataclass(frozen=True)
class Flat(TimeFirst):
    """A result with one row for each time and each row of the batch."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return (model[0](x) - y).flatten(0, 1).square()


def test_a_flattened_result_comes_back_in_order(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, Flat(), {"input_batch_dim": 1}, steps=1)
