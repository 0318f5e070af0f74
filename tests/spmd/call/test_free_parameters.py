"""Parameters that no module holds, trained by an optimizer of their own or with those of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks


class Agent:
    """As in SAC: a temperature, plain tensors in a list beside the model's parameters, and master weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor = nn.Linear(3, 2)
        self.scales = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        self.masters = [p.detach().clone().double().requires_grad_() for p in self.actor.parameters()]
        self.optimizer = torch.optim.SGD([*self.masters, *self.scales], lr=0.1, momentum=0.9)
        self.log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=0.05)

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha.exp()

    def step(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        self.actor.zero_grad()
        actions = self.actor(x.float()).double() * self.scales[0] + self.scales[1]
        loss = (self.alpha.detach() * actions.square()).mean()
        loss.backward()
        for master, parameter in zip(self.masters, self.actor.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.double()
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.actor.parameters(), strict=True):
                parameter.copy_(master)
        self.alpha_optimizer.zero_grad()
        (self.log_alpha * (1 - actions.detach().mean())).mean().backward()
        self.alpha_optimizer.step()
        return loss.detach(), self.alpha.detach()


def trained(rank: int, world: int, mode: str) -> int:
    compiled, plain = Agent(), Agent()
    if rank:
        with torch.no_grad():
            compiled.log_alpha.fill_(0.5)  # that of rank 0 counts
    step = spmd.compile(compiled.step, parallel_mode=mode)  # type: ignore[arg-type]
    for k in range(5):
        parts = [torch.randn(4, 3, generator=random_generator(r, k), dtype=torch.float64) for r in range(world)]
        loss, alpha = step(parts[rank])
        expected, expected_alpha = plain.step(torch.cat(parts))
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(alpha.reshape(-1), expected_alpha, rtol=1e-6, atol=1e-8)
    for got, want in zip([compiled.log_alpha, *compiled.scales], [plain.log_alpha, *plain.scales], strict=True):
        whole = got.full_tensor() if hasattr(got, "full_tensor") else got
        torch.testing.assert_close(whole.detach(), want.detach(), rtol=1e-6, atol=1e-8)
    return len(step.programs)


@pytest.mark.parametrize("mode", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard", "zero1"])
def test_they_are_those_of_the_plain_step(ranks: Ranks, mode: str) -> None:
    assert ranks.run(2, trained, mode) == [1, 1]


def passed(temperature: Tensor, optimizer: Any, x: Tensor) -> Tensor:
    loss = (temperature * x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.usefixtures("alone")
def test_one_that_is_an_argument_is_the_optimizers() -> None:
    step, losses = spmd.compile(passed), []
    for run in (step, passed):
        temperature = torch.ones(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([temperature], lr=0.1)
        losses.append([run(temperature, optimizer, torch.full((4, 1), k + 1.0).double()) for k in range(3)])
        losses[-1].append(temperature.detach())
    torch.testing.assert_close(losses[0], losses[1])
    assert len(step.programs) == 1 and step.program is not None
    assert "temperature" in {each.name.rpartition(".")[2] for each in step.program.inputs}
