"""Settings beside models in one container, and code that decorators of torch wrap, count as all others do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone")]

Change = Callable[[], None]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def list_in_a_dict() -> tuple[Any, Change]:
    """The model is an argument, too."""
    model, optimizer = model_and_optimizer()
    kept = {"model": model, "scales": [1.0]}

    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(F.mse_loss(kept["model"](x), y) * kept["scales"][0], optimizer)

    return step, lambda: kept["scales"].__setitem__(0, 5.0)


def dict_in_a_closure() -> tuple[Any, Change]:
    model, optimizer = model_and_optimizer()
    kept: dict[str, Any] = {"inner": {"scale": 1.0}, "model": model, "optimizer": optimizer}

    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(F.mse_loss(kept["model"](x), y) * kept["inner"]["scale"], kept["optimizer"])

    return step, lambda: kept["inner"].update(scale=5.0)


class Trainer:
    """Has pairs of a model and a list, and a dict that leads back to itself."""

    def __init__(self) -> None:
        self.model, self.optimizer = model_and_optimizer()
        self.pairs = [(self.model, [1.0])]
        self.back = {"owner": self, "scales": [1.0], "tensors": [torch.ones(3, dtype=torch.float64)]}

    def of_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        losses = [F.mse_loss(model(x), y) * scale[0] for model, scale in self.pairs]
        return update(torch.stack(losses).sum(), self.optimizer)

    def of_back(self, x: Tensor, y: Tensor) -> Tensor:
        difference = (self.model(x) - y) * self.back["tensors"][0] * self.back["scales"][0]  # type: ignore[index]
        return update(difference.square().mean(), self.optimizer)


def list_in_a_tuple() -> tuple[Any, Change]:
    trainer = Trainer()
    return trainer.of_pairs, lambda: trainer.pairs[0][1].__setitem__(0, 5.0)


def list_beside_the_owner() -> tuple[Any, Change]:
    trainer = Trainer()
    return trainer.of_back, lambda: trainer.back["scales"].__setitem__(0, 5.0)  # type: ignore[attr-defined]


def tensor_in_a_list() -> tuple[Any, Change]:
    trainer = Trainer()
    other = torch.full((3,), 2.0, dtype=torch.float64)
    return trainer.of_back, lambda: trainer.back["tensors"].__setitem__(0, other)  # type: ignore[attr-defined]


MAKERS = [list_in_a_dict, dict_in_a_closure, list_in_a_tuple, list_beside_the_owner, tensor_in_a_list]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_a_setting_that_changes_compiles_anew(make: Callable[[], tuple[Any, Change]]) -> None:
    x, y = torch.ones(2, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    losses = []
    for compiled in (lambda step: step, spmd.compile):
        plain, change = make()
        step = compiled(plain)
        found = [float(step(x, y)) for _ in range(3)]
        change()
        losses.append([*found, *(float(step(x, y)) for _ in range(2))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


class Averaged:
    """Updates an average in a method that torch wraps."""

    def __init__(self) -> None:
        self.model, self.optimizer = model_and_optimizer()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def update_average(self) -> None:
        for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(parameter, 0.5)

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = update(F.mse_loss(self.model(x), y), self.optimizer)
        self.update_average()
        return loss

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.average(x), y)


def test_methods_that_torch_wraps_are_searched() -> None:
    x, y = torch.ones(2, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    plain, trainer = Averaged(), Averaged()
    train, evaluate = spmd.compile(trainer.train_step), spmd.compile(trainer.evaluate)
    for _ in range(3):
        assert float(train(x, y)) == pytest.approx(float(plain.train_step(x, y)), rel=1e-12)
        assert float(evaluate(x, y)) == pytest.approx(float(plain.evaluate(x, y)), rel=1e-12)


def test_models_in_defaults_and_behind_names_in_tuples_are_found() -> None:
    model, optimizer = model_and_optimizer()
    holder = SimpleNamespace(first=model)

    def loss_of(x: Tensor, y: Tensor, also: nn.Module = model) -> Tensor:
        return F.mse_loss(also(x), y)

    def step(x: Tensor, y: Tensor) -> Tensor:
        named = [getattr(holder, name)(x) for name in ("first",)]
        return update(loss_of(x, y) + named[0].mean(), optimizer)

    x, y = torch.ones(2, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    expected = float(loss_of(x, y) + model(x).mean())
    assert float(spmd.compile(step)(x, y)) == pytest.approx(expected, rel=1e-12)
