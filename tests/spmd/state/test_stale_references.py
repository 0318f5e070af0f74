"""What was built from parameters before a step split the model: optimizers are rebound, lists are warned of."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import spmd
from tests.harness.fake import fake_world
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Average:
    """A moving average as users write it."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.shadow = [parameter.detach().clone() for parameter in self.parameters]


def messages(build: Callable[[nn.Module], Any], style: str = "fully_shard") -> list[str]:
    """The warnings of two calls, of a model from which ``build`` built something."""
    with fake_world(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        held = build(model)
        optimizer = torch.optim.AdamW(model.parameters())
        step = spmd.compile(parallel_mode=spmd.DataParallel(style))(train_step)
        for _ in range(2):
            step(model, optimizer, torch.ones(2, 4))
        del held
    return [str(each.message) for each in caught if "split the model" in str(each.message)]


@pytest.mark.parametrize(
    "build",
    [
        lambda model: list(model.parameters()),
        lambda model: dict(model.named_parameters()),
        Average,
    ],
    ids=["list", "dict", "average"],
)
def test_what_goes_stale_is_warned_of_once(build: Callable[[nn.Module], Any]) -> None:
    (message,) = messages(build)
    assert "after the first call, or pass it" in message and "model.0.weight" in message


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def update_outside(rank: int, world: int, kind: str, style: str) -> None:
    """Train with an optimizer that the step does not take, and that is built before the first call; compare."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double())
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizers = [getattr(torch.optim, kind)(each.parameters(), lr=0.1, **settings) for each in models]
    steps = [spmd.compile(parallel_mode=spmd.DataParallel(style))(gradients), gradients]
    for k in range(4):
        x = torch.randn(2 * world, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        losses = [step(model, part) for step, model, part in zip(steps, models, (x[2 * rank :][:2], x), strict=True)]
        torch.testing.assert_close(losses[0], losses[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with spmd.unshard(models[0]):
        for ours, theirs in zip(*(each.parameters() for each in models), strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind, style", [("SGD", "fully_shard"), ("AdamW", "fully_shard"), ("SGD", "replicate")])
def test_an_optimizer_outside_of_the_step_updates_the_model(ranks: Ranks, kind: str, style: str) -> None:
    ranks.run(2, update_outside, kind, style)


def update_frozen(rank: int, world: int) -> None:
    """As above, where the user has kept the collector from all there is, which then finds no referrers of it."""
    optimizer = torch.optim.Optimizer
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "__init__", frozen_after(optimizer.__init__))
            update_outside(rank, world, "SGD", "fully_shard")
    finally:
        gc.unfreeze()


def frozen_after(init: Any) -> Any:
    def freezing(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        gc.freeze()

    return freezing


def test_so_does_one_that_is_frozen(ranks: Ranks) -> None:
    ranks.run(2, update_frozen)


@pytest.mark.parametrize(
    "build",
    [
        lambda model: None,
        lambda model: AveragedModel(model),
        lambda model: {name: value.detach().clone() for name, value in model.named_parameters()},
        lambda model: model.state_dict(),
        lambda model: model(torch.ones(2, 4)).sum(),
        lambda model: list(model.modules()),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: [parameter.register_hook(lambda gradient: gradient) for parameter in model.parameters()],
    ],
    ids=["nothing", "copy", "clones", "state dict", "graph", "modules", "optimizer", "hooks"],
)
def test_nothing_else_is_warned_of(build: Callable[[nn.Module], Any]) -> None:
    assert messages(build) == []


def test_the_list_that_a_recurrent_layer_keeps_refers_to_the_new_ones() -> None:
    def wrapped(model: nn.Module) -> None:
        model[1] = nn.LSTM(4, 4)  # type: ignore[operator]
        model[2] = First()  # type: ignore[operator]

    assert not messages(wrapped)


class First(nn.Module):
    def forward(self, results: tuple[Tensor, ...]) -> Tensor:
        return results[0]


def test_a_model_that_stays_whole_is_not_split() -> None:
    assert messages(lambda model: list(model.parameters()), "replicate") == []


def test_a_step_that_takes_parameters_knows_what_to_do() -> None:
    def step(model: nn.Module, parameters: list[Tensor], x: Tensor) -> Tensor:
        return model(x).sum().detach() + sum(parameter.detach().sum() for parameter in parameters)

    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(4, 4)
        compiled = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(step)
        compiled(model, list(model.parameters()), torch.ones(2, 4))
        compiled(model, list(model.parameters()), torch.ones(2, 4))


def test_an_lbfgs_from_before_that_calls_the_step_moves_the_split_model() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    with fake_world(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(4, 4)
        optimizer = torch.optim.LBFGS(model.parameters())
        spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(step)(model, torch.ones(2, 4))
    assert [*map(id, optimizer._params)] == [*map(id, model.parameters())]
