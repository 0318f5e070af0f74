"""Schedulers whose optimizer has its groups in another order, or divided otherwise, than when they were saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import spmd

from .runs import unequal

pytestmark = pytest.mark.usefixtures("alone")

Make = Callable[[torch.optim.Optimizer, Sequence[int]], Any]
RATES = {0: 0.1, 1: 0.001, 2: 0.02}  # by layer


class Decay:
    """A factor that has state of its own, which torch saves."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, epoch: int) -> float:
        return self.rate**epoch


def sequence(optimizer: torch.optim.Optimizer, order: Sequence[int]) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


# How each is made for an optimizer whose groups are the layers in this order.
KINDS: dict[str, Make] = {
    "LambdaLR": lambda o, order: lr_scheduler.LambdaLR(o, [Decay(0.9 + k / 50) for k in order]),
    "MultiplicativeLR": lambda o, order: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o, order: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o, order: lr_scheduler.MultiStepLR(o, [1, 4, 6], 0.5),
    "CosineAnnealingWarmRestarts": lambda o, order: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "ReduceLROnPlateau": lambda o, order: lr_scheduler.ReduceLROnPlateau(
        o, factor=0.1, patience=0, min_lr=[RATES[k] / 2000 for k in order]
    ),
    "CyclicLR": lambda o, order: lr_scheduler.CyclicLR(
        o, [RATES[k] / 2 for k in order], [RATES[k] * 2 for k in order], 3, cycle_momentum=False
    ),
    "OneCycleLR": lambda o, order: lr_scheduler.OneCycleLR(o, [RATES[k] for k in order], 10, three_phase=True),
    "SequentialLR": sequence,
    "ChainedScheduler": lambda o, order: lr_scheduler.ChainedScheduler(
        [sequence(o, order), KINDS["LambdaLR"](o, order)]
    ),
    "SWALR": lambda o, order: torch.optim.swa_utils.SWALR(o, [RATES[k] / 3 for k in order], anneal_epochs=6),
}


def make(order: Sequence[int], kind: Make) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    groups = [{"params": list(model[k].parameters()), "lr": RATES[k]} for k in order]
    optimizer = torch.optim.AdamW(groups)
    return {"model": model, "optimizer": optimizer, "scheduler": kind(optimizer, order)}


def train(objects: dict[str, Any], steps: int) -> list[dict[str, float]]:
    """The learning rate of each parameter, after each step."""
    rates, (model, optimizer, scheduler) = [], objects.values()
    for _ in range(steps):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        names = {parameter: name for name, parameter in model.named_parameters()}
        rates.append({names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]})
    return rates


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_goes_on_whatever_the_order_of_groups(kind: str, tmp_path: Path) -> None:
    run = make((0, 1, 2), KINDS[kind])
    train(run, 3)
    spmd.save(tmp_path, **run)
    expected = train(run, 5)
    other = make((2, 0, 1), KINDS[kind])
    spmd.load(tmp_path, **other)
    assert train(other, 5) == expected
    assert unequal(run["model"].state_dict(), other["model"].state_dict()) == []
    assert len({*map(str, expected)}) > 1, "the rates change"


def test_groups_may_be_divided_and_joined(tmp_path: Path) -> None:
    def in_groups(*groups: Sequence[int]) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        own = [{"params": [p for k in group for p in model[k].parameters()], "lr": RATES[group[0]]} for group in groups]
        optimizer = torch.optim.AdamW(own)
        return {"model": model, "optimizer": optimizer, "scheduler": lr_scheduler.StepLR(optimizer, 2, 0.5)}

    run = in_groups((0, 1), (2,))
    train(run, 3)
    spmd.save(tmp_path / "joined", **run)
    expected = train(run, 3)
    divided = in_groups((2,), (1,), (0,))
    spmd.load(tmp_path / "joined", **divided)
    spmd.save(tmp_path / "divided", **divided)
    assert train(divided, 3) == expected
    joined = in_groups((0, 1), (2,))
    spmd.load(tmp_path / "divided", **joined)
    assert train(joined, 3) == expected


class Warmup(lr_scheduler.LRScheduler):
    """A user's own, with a list that may be one of groups."""

    def __init__(self, optimizer: torch.optim.Optimizer, factors: list[float]) -> None:
        self.factors = factors
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [base * factor for base, factor in zip(self.base_lrs, self.factors, strict=True)]


class Unnamed(Warmup):
    """Its state is no dict."""

    def state_dict(self) -> Any:
        return [1, 2]


@pytest.mark.parametrize(
    "kind, why",
    [(Warmup, "what factors has for which group is not known"), (Unnamed, "its state is no dict")],
)
def test_what_is_not_known_of_groups_is_refused_before_anything_changes(kind: Any, why: str, tmp_path: Path) -> None:
    def made(order: Sequence[int]) -> dict[str, Any]:
        return make(order, lambda optimizer, order: kind(optimizer, [1.0 + k for k in order]))

    run = made((0, 1, 2))
    train(run, 2)
    spmd.save(tmp_path, **run)
    spmd.load(tmp_path, **made((0, 1, 2))) if kind is Warmup else None
    other = made((1, 0, 2))
    before = copy.deepcopy({name: each.state_dict() for name, each in other.items()})
    with pytest.raises(ValueError, match=f"scheduler: the groups of optimizer were in another order.* and {why}. Make"):
        spmd.load(tmp_path, **other)
    after = {name: each.state_dict() for name, each in other.items()}
    assert unequal(before.pop("model"), after.pop("model")) == [] and before == after


def test_groups_whose_entries_differ_are_not_joined(tmp_path: Path) -> None:
    """Equal to the digits that torch prints; and a minimum that only the scheduler knows."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    for rates, least, why in (
        ((0.1, 0.10000001), (0.0, 0.0), "group 0 has parameters of groups that were saved with different lr"),
        ((0.1, 0.1), (0.0, 0.01), "and group 0 has parameters of groups with different min_lrs"),
    ):
        groups = [
            {"params": list(each.parameters()), "lr": torch.tensor(lr)} for each, lr in zip(model, rates, strict=True)
        ]
        optimizer = torch.optim.AdamW(groups)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=list(least))
        spmd.save(tmp_path, model=model, optimizer=optimizer, scheduler=scheduler)
        one = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
        with pytest.raises(ValueError, match=why):
            spmd.load(tmp_path, model=model, optimizer=one, scheduler=lr_scheduler.ReduceLROnPlateau(one))
