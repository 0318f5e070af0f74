"""Every optimizer of torch that needs no closure, in each of its forms, and optimizers that users write themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from tests.harness.cases import MLP
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks

# name: (class, options, forms besides the plain one)
_KINDS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "SGD": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, ("foreach", "fused")),
    "SGD dampening, maximize": (optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "maximize": True}, ()),
    "SGD, zeros": (optim.SGD, {"lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}, ()),
    "Adam": (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}, ("foreach", "fused")),
    "AdamW": (optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}, ("foreach", "fused")),
    "AdamW, zeros": (optim.AdamW, {"lr": 0.01, "betas": (0.0, 0.0), "weight_decay": 0.0, "eps": 0.1}, ()),
    "NAdam": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}, ("foreach",)),
    "RAdam": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.01}, ("foreach",)),
    "Adamax": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.01}, ("foreach",)),
    "Adadelta": (optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}, ("foreach",)),
    "Adagrad": (
        optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.1},
        ("foreach", "fused"),
    ),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.01}, ("foreach",)),
    "Rprop": (optim.Rprop, {"lr": 0.01}, ("foreach",)),
    "ASGD": (optim.ASGD, {"lr": 0.05, "t0": 2.0, "weight_decay": 0.01}, ()),
    "Adafactor": (optim.Adafactor, {"lr": 0.05, "weight_decay": 0.01}, ("foreach",)),
    "Muon": (optim.Muon, {"lr": 0.05}, ()),
}
_RATES = {"float32": torch.float32, "float64": torch.float64}
_TAKING_TURNS = (("replicate", 2), ("fully_shard", 4), ("replicate", 4), ("fully_shard", 2))


@dataclass(frozen=True)
class With(MLP):
    """An MLP with one of the optimizers above; ``rate`` makes its learning rate a tensor of this dtype."""

    sizes: tuple[int, ...] = (15, 7, 3)
    rows: int = 5
    form: str = ""
    rate: str = ""

    def build(self) -> tuple[Any, ...]:
        model = MLP.build(MLP(self.sizes))[0]
        kind, options, _ = _KINDS[self.optimizer]
        options = options | ({self.form: True} if self.form else {})
        if self.rate:
            options["lr"] = torch.tensor(options["lr"], dtype=_RATES[self.rate])
        matrices_only = kind is optim.Muon
        return model, kind([p for p in model.parameters() if p.ndim == 2 or not matrices_only], **options)

    @staticmethod
    def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return
    forms = [(kind, form) for kind, (_, _, forms) in _KINDS.items() for form in ("", *forms)]
    if metafunc.config.getoption("--exhaustive"):
        grid = [(*each, *where) for each in forms for where in _TAKING_TURNS]
    else:
        grid = [(*each, *_TAKING_TURNS[k % 4]) for k, each in enumerate(forms)]
    metafunc.parametrize("kind, form, style, world", grid)


def test_an_optimizer_updates_as_on_one_device(ranks: Ranks, kind: str, form: str, style: str, world: int) -> None:
    assert_agrees(ranks, world, With(optimizer=kind, form=form), style, steps=7)


@pytest.mark.parametrize("kind, form, rate", [("AdamW", "", "float32"), ("Adam", "fused", "float32")])
def test_a_learning_rate_may_be_a_tensor(ranks: Ranks, kind: str, form: str, rate: str) -> None:
    assert_agrees(ranks, 2, With(optimizer=kind, form=form, rate=rate), "fully_shard")
