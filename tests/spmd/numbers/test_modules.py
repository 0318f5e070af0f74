"""Buffers, batch statistics, frozen and tied parameters, modules called twice: all as in the plain step."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.harness.cases import MLP, ON_THREE, THREE_IN_TURN, in_turn, make_optimizer, mlp
from tests.harness.oracle import Case, Later, assert_agrees, random_generator
from tests.harness.pool import Ranks


class RunningMean(nn.Module):
    """Subtracts a running mean over batches and counts its calls; ``assign`` replaces the buffer, or writes into it."""

    def __init__(self, width: int, assign: bool) -> None:
        super().__init__()
        self.assign = assign
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.assign:
            self.mean = 0.9 * self.mean + 0.1 * mean
        else:
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        self.calls += 1
        return x - self.mean


@dataclass(frozen=True)
class Small(MLP):
    """A 15-17-4 regression at 6 rows a rank."""

    sizes: tuple[int, ...] = (15, 17, 4)
    rows: int = 6


@dataclass(frozen=True)
class Buffers(Small):
    assign: bool = False

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(mlp(15, 16), RunningMean(16, self.assign), nn.Linear(16, 4)).double()
        return model, make_optimizer(self.optimizer, model.parameters())


class BatchNorm(Small):
    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(15, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)).double()
        return model, make_optimizer(self.optimizer, model.parameters())


class LayerNorm(Small):
    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(15, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).double()
        return model, make_optimizer(self.optimizer, model.parameters())


@dataclass(frozen=True)
class Frozen(Small):
    """The first weight is frozen and yet handed to the optimizer; the last bias is trained and is not."""

    optimizer: str = "SGD momentum"

    def build(self) -> tuple[Any, ...]:
        model = mlp(*self.sizes)
        first, *others, _ = model.parameters()
        first.requires_grad_(False)
        return model, make_optimizer(self.optimizer, [first, *others])


class Unused(Small):
    """A module that no forward calls: no gradient, no state, no update."""

    def build(self) -> tuple[Any, ...]:
        model = mlp(*self.sizes)
        model[0].spare = nn.Linear(3, 4).double()
        return model, make_optimizer("SGD momentum", model.parameters())


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Linear(15, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.layer(torch.tanh(self.layer(torch.tanh(self.up(x)))))))


class CalledTwice(Small):
    def build(self) -> tuple[Any, ...]:
        model = Twice().double()
        return model, make_optimizer(self.optimizer, model.parameters())


class Tied(nn.Module):
    """The embedding is the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


@dataclass(frozen=True)
class TiedWeights(Small):
    optimizer: str = "SGD momentum"

    def build(self) -> tuple[Any, ...]:
        model = Tied().double()
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randint(11, (self.rows, 5), generator=random) for _ in range(2))  # (rows, time)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class KeepsGraphs(Small):
    """Two modules that keep tensors which a graph computes, from call to call."""

    def build(self) -> tuple[Any, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            layers = [nn.utils.weight_norm(nn.Linear(*sizes).double()) for sizes in ((15, 16), (16, 4))]
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        return model, make_optimizer(self.optimizer, model.parameters())


CASES: dict[str, Case] = {
    "buffers written in place": Buffers(),
    "buffers assigned": Buffers(assign=True),
    "batch norm": BatchNorm(),
    "layer norm": LayerNorm(),
    "frozen": Frozen(),
    "unused": Unused(),
    "called twice": CalledTwice(),
    "tied": TiedWeights(),
    "graphs that modules keep": KeepsGraphs(),
}


OTHER_IN_EVAL = ("buffers assigned", "batch norm")


@pytest.mark.parametrize("name", CASES)
def test_modules_of_every_kind_train_as_in_the_plain_step(
    ranks: Ranks, name: str, request: pytest.FixtureRequest
) -> None:
    for style, world in in_turn(request, list(CASES).index(name), (ON_THREE, *THREE_IN_TURN[1:])):
        case = Later(CASES[name]) if name in OTHER_IN_EVAL else CASES[name]
        assert_agrees(ranks, world, case, style, steps=5 if name in OTHER_IN_EVAL else 3)
