"""Parameters that are frozen, for good, between steps or within one; and optimizers that step inside of backward."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, THREE_IN_TURN, in_turn, mlp
from tests.harness.oracle import Case, assert_agrees
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts, regression


@dataclass(frozen=True)
class FrozenInTurns(MLP):
    """What is trained changes from step to step; momentum waits meanwhile."""

    sizes: tuple[int, ...] = (5, 7, 4)
    rows: int = 6
    optimizer: str = "SGD momentum"

    def after(self, objects: tuple[Any, ...], step: int) -> None:
        model = objects[0]
        trained = [(True, True), (False, True), (False, False), (True, True)][step % 4]
        model[0].weight.requires_grad_(trained[0])
        model[2].requires_grad_(trained[1])


@dataclass(frozen=True)
class Adversarial(MLP):
    """A GAN whose step freezes the discriminator while the generator learns, and leaves it so."""

    sizes: tuple[int, ...] = (5, 7, 4)
    rows: int = 6

    starts_frozen: bool = True

    def build(self) -> tuple[Any, ...]:
        generator, discriminator = mlp(5, 7, 4), mlp(4, 6, 1).requires_grad_(not self.starts_frozen)
        make: Any = partial(torch.optim.SGD, momentum=0.9) if self.starts_frozen else torch.optim.AdamW
        optimizers = [make(net.parameters(), lr=0.05) for net in (generator, discriminator)]
        return generator, discriminator, optimizers

    @staticmethod
    def step(generator: Any, discriminator: Any, optimizers: Any, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        discriminator.requires_grad_(True)
        fake = generator(x)
        loss = F.softplus(discriminator(fake.detach())).mean() + F.softplus(-discriminator(y)).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        discriminator.requires_grad_(False)
        fooled = F.softplus(-discriminator(fake)).mean()
        fooled.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.detach(), fooled.detach()


def step_and_clear(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


@dataclass(frozen=True)
class StepsInBackward(MLP):
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""

    sizes: tuple[int, ...] = (5, 7, 4)
    rows: int = 6

    def build(self) -> tuple[Any, ...]:
        model = mlp(*self.sizes)
        optimizers = [torch.optim.SGD([parameter], lr=0.05, momentum=0.9) for parameter in model.parameters()]
        for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(step_and_clear, optimizer))
        return model, optimizers

    @staticmethod
    def step(model: nn.Module, optimizers: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss


CASES: list[Case] = [FrozenInTurns(), Adversarial(), StepsInBackward(), Adversarial(starts_frozen=False)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_frozen_parameters_are_those_of_the_plain_step(
    ranks: Ranks, case: Case, request: pytest.FixtureRequest
) -> None:
    for style, world in in_turn(request, CASES.index(case), (*THREE_IN_TURN, ("fully_shard", 2))):
        assert_agrees(ranks, world, case, style, steps=6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("style, reduction", [("replicate", "all_reduce"), ("fully_shard", "reduce_scatter")])
def test_frozen_parameters_cause_no_gradient_traffic(style: str, reduction: str) -> None:
    model, optimizer, x, y = regression(5, 7, 4)
    model[0].requires_grad_(False)
    options: dict[str, Any] = {"parallel_mode": spmd.DataParallel(style), "passes": ()}
    compiled = compile_on_fake_ranks(2, MLP.step, (model, optimizer), x, y, **options)
    trained = len(list(model[2].parameters()))
    loss = 1
    expected = {"all_reduce": loss, reduction: trained + (loss if reduction == "all_reduce" else 0)}
    got = counts(compiled)
    assert {kind: got.get(kind, 0) for kind in expected} == expected
    why = [node.meta["collective"] for node in compiled.program.collectives()]
    assert not [each for each in why if each.role == "gradient" and any("model.0" in name for name in each.of)]


@pytest.mark.usefixtures("alone")
def test_a_wholly_frozen_model_is_run_without_gradients() -> None:
    model, _, x, y = regression(5, 7, 4)
    model.requires_grad_(False)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x), y)

    compiled = compile_on_fake_ranks(2, step, (model,), x, y)
    assert counts(compiled) == {"all_reduce": 1}
