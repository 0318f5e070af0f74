"""Several modules and several optimizers in one step, parameter groups in any order."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from spmd.call.refuse_saves import RefusedSaves
from spmd.call.state import ArgumentReader
from spmd.deferral.pending import Hooks
from spmd.ranks.consensus import standing_of
from tests.harness.cases import THREE_IN_TURN, in_turn, mlp
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks


class TwoOptimizers(Case):
    """An encoder and a decoder; groups list parameters backwards, with options of their own."""

    def build(self) -> tuple[Any, ...]:
        encoder, decoder = mlp(15, 12, 9), mlp(9, 7, 3)
        last, *others = reversed(list(encoder.parameters()))
        groups = [{"params": others, "lr": 0.03}, {"params": [last], "momentum": 0.0, "weight_decay": 0.1}]
        first = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        weights = [p for p in decoder.parameters() if p.ndim > 1]
        biases = [p for p in decoder.parameters() if p.ndim == 1]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights[::-1], "betas": (0.8, 0.9)}]
        return encoder, decoder, first, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(6, size, generator=random, dtype=torch.float64) for size in (15, 3))

    @staticmethod
    def step(encoder: nn.Module, decoder: nn.Module, first: Any, second: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(decoder(encoder(x)), y)
        loss.backward()
        second.step()
        first.step()
        first.zero_grad()
        second.zero_grad()
        return loss


class Adversaries(Case):
    """Two modules in a dict, two optimizers in a list, two backward passes, two results."""

    def build(self) -> tuple[Any, ...]:
        nets = {"generator": mlp(15, 12, 9), "critic": mlp(9, 7, 1)}
        return nets, [torch.optim.AdamW(nets["critic"].parameters()), torch.optim.SGD(nets["generator"].parameters())]

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(6, size, generator=random, dtype=torch.float64) for size in (15, 9))

    @staticmethod
    def step(nets: dict[str, nn.Module], optimizers: list[Any], noise: Tensor, real: Tensor) -> dict[str, Tensor]:
        made = nets["generator"](noise)
        critic_loss = F.softplus(nets["critic"](made.detach())).mean() + F.softplus(-nets["critic"](real)).mean()
        critic_loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        generator_loss = F.softplus(-nets["critic"](made)).mean()
        generator_loss.backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return {"critic": critic_loss.detach(), "generator": generator_loss.detach()}


class OneForBoth(TwoOptimizers):
    """Two modules in a list, one optimizer for both; its groups name them in another order."""

    def build(self) -> tuple[Any, ...]:
        encoder, decoder = mlp(15, 9), mlp(9, 3)
        backwards = list(encoder.parameters())[::-1]
        groups = [{"params": decoder.parameters(), "lr": 0.02}, {"params": backwards, "weight_decay": 0.0}]
        return [encoder, decoder], torch.optim.AdamW(groups, lr=0.01)

    @staticmethod
    def step(modules: list[nn.Module], optimizer: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.mse_loss(modules[1](modules[0](x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimization: a step up the gradient, and another optimizer's step from where that began.

    Both share their groups, and the weights are put back through ``.data``, as in the implementation most people use.
    """

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()


class OneWithinAnother(TwoOptimizers):
    """An optimizer that has another as its attribute."""

    def build(self) -> tuple[Any, ...]:
        model = mlp(15, 3)
        optimizer = Sharpness(model.parameters(), lr=0.01)
        return model, optimizer, optimizer.base

    @staticmethod
    def step(model: nn.Module, optimizer: Any, base: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.climb()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return loss


class Trained(nn.Module):
    """A module with its own optimizers, one of them within another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(15, 3)
        self.optimizer = Sharpness(self.net.parameters(), lr=0.01)


class WithinTheModule(TwoOptimizers):
    """A module that has its optimizer as an attribute."""

    def build(self) -> tuple[Any, ...]:
        return (Trained(),)

    @staticmethod
    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return OneWithinAnother.step(model.net, model.optimizer, None, x, y)


CASES: list[Case] = [TwoOptimizers(), Adversaries(), OneForBoth(), OneWithinAnother(), WithinTheModule()]


@pytest.mark.parametrize("which", range(len(CASES)), ids=[type(case).__name__ for case in CASES])
def test_several_modules_and_optimizers(ranks: Ranks, which: int, request: pytest.FixtureRequest) -> None:
    for style, world in in_turn(request, which, (*THREE_IN_TURN, ("fully_shard", 2), *THREE_IN_TURN[1:])):
        assert_agrees(ranks, world, CASES[which], style)


class Delegating(torch.optim.Optimizer):
    """Wraps an optimizer and has no state of its own, as those of accelerate and Fabric."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Lookahead(torch.optim.Optimizer):
    """Has groups and state of the optimizer that it wraps for its own, and keeps slow weights there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    state_dict = Delegating.state_dict
    zero_grad = Delegating.zero_grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"] if self.steps % 2 == 0 else ():
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


def test_an_optimizer_that_takes_no_hooks_hides_no_failure_of_a_call() -> None:
    def step(model: nn.Module, optimizer: Any) -> None: ...

    model = nn.Linear(2, 2)
    given = ArgumentReader(inspect.signature(step)).read((model, Lookahead(torch.optim.SGD(model.parameters()))), {})
    refused = RefusedSaves(given, "partly updated", standing_of(None))
    with pytest.raises(spmd.SpmdError, match="cannot be saved: partly updated"):
        model.state_dict()
    refused.allow()
    Hooks(SimpleNamespace(owners=lambda: [model, *given.optimizers.values()], finish_pending=lambda: None)).remove()
    assert model.state_dict()


@dataclass(frozen=True)
class Wrapped(Case):
    wrapper: Any = Delegating

    def build(self) -> tuple[Any, ...]:
        model = mlp(15, 3)
        return model, self.wrapper(torch.optim.AdamW(model.parameters(), lr=0.01))

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(6, size, generator=random, dtype=torch.float64) for size in (15, 3))

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("wrapper", [Delegating, Lookahead])
@pytest.mark.parametrize("mode", ["fully_shard", {"shard_optimizer": True}])
@pytest.mark.in_turn("mode")
def test_an_optimizer_may_have_the_state_of_the_one_that_it_wraps(ranks: Ranks, mode: Any, wrapper: type) -> None:
    assert_agrees(ranks, 2, Wrapped(wrapper), mode, steps=5)
