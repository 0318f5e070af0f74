"""A mean loss is the mean over the global batch, whatever it divides by; a sum loss is the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional as F

from tests.harness.cases import MLP, STYLES_ON_RANKS
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks


@dataclass(frozen=True)
class Regression(MLP):
    """Losses that no data divides."""

    sizes: tuple[int, ...] = (15, 4)
    rows: int = 6


class SumOfOutputs(Regression):
    """The simplest loss of all: its gradient is one number, expanded."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class SquaredSum(Regression):
    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y, reduction="sum") / 100
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class RootOfMean(Regression):
    """Ops on the mean, which need the global one."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean().sqrt() + 0.1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@dataclass(frozen=True)
class Classification(MLP):
    """Cross entropy where each rank counts another number of targets, and the last rank none at all."""

    sizes: tuple[int, ...] = (15, 5)
    rows: int = 6

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        x = torch.randn(self.rows, self.sizes[0], generator=random, dtype=torch.float64)
        targets = torch.randint(self.sizes[-1], (self.rows,), generator=random)
        ignored = 2 * rank if rank + 1 < 4 else self.rows
        targets[self.rows - ignored :] = -100
        return x, targets

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class SummedClassification(Classification):
    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class SmoothedClassification(Classification):
    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class WeightedByHand(Classification):
    """The user's own masked mean: a sum over a count."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        mask = (y != -100).double()
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Policy(Classification):
    """``torch.distributions``, with advantages normalized over the global batch."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, targets = super().part(rank, step)
        return x, targets.clamp(min=0)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        policy, values = Categorical(logits=scores), Normal(scores.mean(1), scores.std(1))
        advantages = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
        gain = policy.log_prob(y).exp() * advantages + values.log_prob(x[:, 1])
        loss = -(gain + 0.1 * policy.entropy()).mean() + kl_divergence(values, Normal(0.0, 1.0)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


CASES: list[Case] = [
    SumOfOutputs(),
    SquaredSum(),
    RootOfMean(),
    Classification(),
    SummedClassification(),
    SmoothedClassification(),
    WeightedByHand(),
    Policy(),
]


@pytest.mark.parametrize("style, world", STYLES_ON_RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
@pytest.mark.in_turn("style, world")
def test_the_loss_is_that_of_the_global_batch(ranks: Ranks, case: Case, world: int, style: str) -> None:
    assert_agrees(ranks, world, case, style)
