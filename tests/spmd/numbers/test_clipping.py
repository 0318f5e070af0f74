"""Clipping uses the global norm, and returns it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, in_turn
from tests.harness.oracle import Case, assert_agrees
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts, regression


@dataclass(frozen=True)
class ByNorm(MLP):
    """5 x 7 weights, and parameters of one element: nothing divides by the ranks."""

    sizes: tuple[int, ...] = (7, 5, 1)
    rows: int = 5
    optimizer: str = "SGD"
    norm: float = 2.0
    foreach: bool | None = None

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return *super().part(rank, step), self.norm, self.foreach

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, norm: float, foreach: bool | None) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()
        return loss, total


INF = float("inf")
CLIPS = [(norm, None) for norm in (0.5, 1.0, 2.0, 3.0, INF)] + [(1.0, True), (2.0, False), (INF, True)]


class ByEachNorm(ByNorm):
    """The same gradients are clipped by one norm after the other, with an update for each, and every norm a result."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, norm: float, foreach: bool | None) -> Any:
        F.mse_loss(model(x), y).backward()
        parameters, norms = list(model.parameters()), {}
        gradients = [p.grad.clone() for p in parameters]
        for each, form in CLIPS:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad.copy_(gradient)
            norms[f"{each} {form}"] = nn.utils.clip_grad_norm_(parameters, 0.05, each, foreach=form)
            optimizer.step()
        optimizer.zero_grad()
        return norms


class ByValue(ByNorm):
    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, norm: float, foreach: bool | None) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        optimizer.step()
        return loss


class InTwoParts(ByNorm):
    """The norm of all gradients, then clipping; gradients outlive the step, to be compared."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, norm: float, foreach: bool | None) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()], norm, foreach=foreach)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total, foreach=foreach)
        optimizer.step()
        return loss, total


class ByHand(ByNorm):
    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, norm: float, foreach: bool | None) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        total = sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.mul_((0.05 / (total + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        return loss, total


class ByHandOnData(ByNorm):
    """One flat norm, and gradients exchanged through ``.data``."""

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, norm: float, foreach: bool | None) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            scale = torch.where(flat.norm() > 0.05, 0.05 / flat.norm(), 1.0)
            for p in model.parameters():
                p.grad.data = p.grad.data * scale
        optimizer.step()
        optimizer.zero_grad()
        return loss, scale


class PerGroup(ByNorm):
    """Each group has a norm of its own; the smaller of the two is clipped hard."""

    @staticmethod
    def step(model: nn.Sequential, optimizer: Any, x: Tensor, y: Tensor, norm: float, foreach: bool | None) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norms = {
            name: nn.utils.clip_grad_norm_(layer.parameters(), 0.01, norm, foreach=foreach)
            for name, layer in model.named_children()
            if list(layer.parameters())
        }
        optimizer.step()
        optimizer.zero_grad()
        return loss, norms


CASES = [
    *(ByEachNorm(), ByValue(), ByValue(foreach=True), InTwoParts(), InTwoParts(norm=INF)),
    *(ByHand(), ByHandOnData(), PerGroup()),
]


# Values are clipped by the same graph with foreach, and norms by the largest element in each group above.
REST = (ByValue(foreach=True), InTwoParts(norm=INF))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.exhaustive) if case in REST else case for case in CASES], ids=str
)
def test_clipping_agrees_with_the_plain_step(ranks: Ranks, case: Case, request: pytest.FixtureRequest) -> None:
    for style, world in in_turn(request, CASES.index(case)):
        assert_agrees(ranks, world, case, style)


def test_each_style_clips_by_each_norm(ranks: Ranks) -> None:
    assert_agrees(ranks, 2, ByEachNorm(), "replicate")  # the other style has its turn above


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_the_norm_of_all_gradients_takes_one_all_reduce_where_they_are_split(style: str, norm: float) -> None:
    def without_result(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm)
        optimizer.step()
        optimizer.zero_grad()

    model, *rest = regression(16, 16, 8)
    mode = spmd.DataParallel(style)
    found = counts(compile_on_fake_ranks(4, without_result, (model, *rest), parallel_mode=mode))
    split = {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}
    assert found == ({"all_reduce": 1} if style == "replicate" else split)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("ask", [nn.utils.clip_grad_norm_, None])
def test_error_if_nonfinite_raises_in_the_call_and_changes_nothing(ask: Any) -> None:
    @spmd.compile
    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if ask is None:
            nn.utils.get_total_norm([p.grad for p in model.parameters()], error_if_nonfinite=True)
        else:
            ask(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

    model, optimizer, x, y = regression(16, 16, 8)
    train_step(model, optimizer, x, y)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"The total norm .* for gradients .* is non-finite"):
        train_step(model, optimizer, x, y * torch.nan)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    train_step(model, optimizer, x, y)
    assert len(train_step.programs) == 1 and not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
