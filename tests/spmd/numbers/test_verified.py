"""``spmd.verify`` agrees on the steps that the tests of modules and losses train, each in one of the modes.

A trainer with what scripts bring beside modules and losses agrees in each of them.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.oracle import Case

from . import test_losses, test_modules

MODES = ("replicate", "fully_shard", "zero1")
# In every run those whose verification differs from that of others in more than ops: what is drawn and returned, tied
# and unused parameters, statistics, weights that are summed over ranks. The numbers of all are compared on ranks.
USUAL = ("Policy", "WeightedByHand", "batch norm", "tied", "unused")
CASES = {**test_modules.CASES, **{type(case).__name__: case for case in test_losses.CASES}}
del CASES["graphs that modules keep"]  # which nothing can copy


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case, mode", [
    pytest.param(case, MODES[k % 3], id=name, marks=[pytest.mark.exhaustive] * (name not in USUAL))
    for k, (name, case) in enumerate(CASES.items())
])  # fmt: skip
def test_what_is_trained_is_verified(case: Case, mode: str) -> None:
    torch.manual_seed(0)
    batch = case.whole([case.part(rank, 0) for rank in range(2)])
    assert isinstance(batch, tuple)
    verdict = spmd.verify(spmd.compile(case.step, parallel_mode=mode), *case.build(), *batch, steps=2, world=2)
    assert verdict, verdict


class Momentum(torch.optim.Optimizer):
    """Corrects its bias by Python's own arithmetic, with rates by parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.rates = {p: 1.0 + k for k, p in enumerate(model.parameters())}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["step"], state["mean"] = 0, torch.zeros_like(p)
            state["step"] += 1
            state["mean"].lerp_(p.grad, 0.1)
            p.sub_(state["mean"] / math.sqrt(1 - 0.9 ** state["step"]) * self.rates[p] * self.param_groups[0]["lr"])


class ActNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))
        self.register_buffer("initialized", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.initialized.item() == 0:
            self.shift.data.copy_(-x.detach().mean(0))
            self.initialized.fill_(1)
        return x + self.shift


class Trainer:
    """Averages, temperatures, meters and masks, as trainers keep them."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(5, 6, bias=False), ActNorm(), nn.Tanh(), nn.Linear(6, 3)).double()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.temperature = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.optimizer, self.tuner = Momentum(self.model), torch.optim.Adam([self.temperature], lr=0.01)
        self.seen = {"mean": torch.zeros(3, dtype=torch.float64)}
        self.meters, self.counts, self.calls = defaultdict[str, float](float), Counter[str](), 0

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        scores = self.model(x) * self.temperature.exp()
        self.seen["mean"].mul_(0.9).add_(scores.detach().mean(0), alpha=0.1)
        loss = F.cross_entropy(scores - self.seen["mean"], y, ignore_index=0)
        loss.backward()
        self.optimizer.step()
        self.tuner.step()
        self.calls += 1
        decay = min(0.9, self.calls / (self.calls + 9))
        with torch.no_grad():
            kept = torch.ones(6, dtype=torch.bool)
            kept[1:3] = False
            self.model[3].weight.t()[kept] = self.average[3].weight.t()[kept]
            for name, value in self.average.state_dict().items():
                if value.is_floating_point():
                    value.lerp_(self.model.state_dict()[name], 1 - decay)
        for each in (self.optimizer, self.tuner):
            each.zero_grad()
        self.meters["loss"] += loss.item()
        self.counts["rows"] += 1
        return loss.detach(), self.meters["loss"] / self.counts["rows"]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", [MODES[1], *(pytest.param(each, marks=pytest.mark.exhaustive) for each in MODES[::2])])
def test_what_scripts_bring_is_verified_in_each_mode(mode: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 0])
    compiled = spmd.compile(Trainer.step, parallel_mode=mode)
    verdict = spmd.verify(compiled, Trainer(), *batch, steps=2, world=2)
    assert verdict and not verdict.notes, verdict
