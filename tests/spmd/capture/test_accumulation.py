"""Gradients accumulated over micro-batches, in one step and over several calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP, in_turn
from tests.harness.oracle import Case, all_unequal, assert_agrees, snapshot
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, counts, shapes

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Small(MLP):
    sizes: tuple[int, ...] = (15, 17, 4)
    rows: int = 8
    optimizer: str = "SGD"  # unlike Adam it sees the scale of a gradient


class Chunks(Small):
    """The step cuts the batch itself."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for x_part, y_part in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.mse_loss(model(x_part), y_part) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total


class UnequalChunks(Small):
    """Micro-batches of unlike sizes and weights; which rows share one decides the loss."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> list[Tensor]:
        losses = []
        for k, (x_part, y_part) in enumerate(zip(x.split(5), y.split(5), strict=True)):
            loss = F.mse_loss(model(x_part), y_part) / (k + 1)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return losses


class Listed(Small):
    """Micro-batches are arguments of their own."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)
        return [*x.chunk(4)], [*y.chunk(4)]

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, xs: list[Tensor], ys: list[Tensor]) -> Tensor:
        total = xs[0].new_zeros(())
        for x, y in zip(xs, ys, strict=True):
            loss = F.mse_loss(model(x), y) / len(xs)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return total


class Stacked(Small):
    """One tensor (micro-batch, row, feature), with ``input_batch_dim=1``."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, y = super().part(rank, step)
        return x.unflatten(0, (4, -1)), y.unflatten(0, (4, -1))

    def whole(self, parts: list[Any]) -> Any:
        return tuple(torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, xs: Tensor, ys: Tensor) -> Tensor:
        losses = []
        for x, y in zip(xs, ys, strict=True):
            loss = F.mse_loss(model(x), y) / len(xs)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()


class EveryThird(Small):
    """``update`` is true in every third call; what is there between calls is the sum so far."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return *super().part(rank, step), step % 3 == 2

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, update: bool) -> Tensor:
        loss = F.mse_loss(model(x), y) / 3
        loss.backward()
        if update:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss


class EveryThirdToZero(EveryThird):
    """The same with gradients that are set to zero instead of None, and two micro-batches a call."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, update: bool) -> list[Tensor]:
        losses = [F.mse_loss(model(x), y) / 6, F.l1_loss(model(x), y) / 6]
        for loss in losses:
            loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return losses


CASES: list[tuple[Case, dict[str, Any]]] = [
    (Chunks(), {}),
    (UnequalChunks(), {}),
    (Listed(), {}),
    (Listed(), {"reduce_gradients": "each"}),
    (Stacked(), {"input_batch_dim": 1}),
    (EveryThird(), {}),
    (EveryThirdToZero(), {}),
]
HELD = CASES[2]  # by micro-batches that are listed and reduced each, and by those that are cut and reduced once
USUAL = [pytest.param(*each, marks=pytest.mark.exhaustive) if each is HELD else each for each in CASES]
REDUCED_EACH = [
    pytest.param(case, {"reduce_gradients": "each"}, marks=pytest.mark.exhaustive)
    for case in (Chunks(), UnequalChunks(), EveryThird())
]


@pytest.mark.parametrize(
    "case, options", [*USUAL, *REDUCED_EACH], ids=lambda x: str(x) if isinstance(x, dict) else type(x).__name__
)
def test_accumulated_gradients_are_those_of_the_plain_step(
    ranks: Ranks, case: Case, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    for style, world in in_turn(request, 2 if "reduce_gradients" in options else CASES.index((case, options))):
        assert_agrees(ranks, world, case, {"parallel_style": style, **options}, steps=7)


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The optimizer is here so that it follows parameters that are split."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def two_steps(case: Case, batches: list[Any], compiled: Any) -> tuple[list[Any], int]:
    """What is seen after each of two compiled steps that share a model, and how many programs there are in the end."""
    torch.manual_seed(0)
    model, optimizer = case.build()
    steps = compiled(accumulate), compiled(update)
    seen = []
    for k, batch in enumerate(batches):
        seen.append(snapshot(steps[0](model, optimizer, *batch), (model, optimizer)))
        if k % 2:
            seen.append(snapshot(steps[1](model, optimizer), (model, optimizer)))
    return seen, sum(len(getattr(step, "programs", ())) for step in steps)


def differences_of_two_steps(rank: int, world: int, style: str) -> tuple[list[str], int]:
    case = Small(optimizer="SGD momentum")
    parts = [[case.part(r, k) for r in range(world)] for k in range(6)]
    expected, _ = two_steps(case, [case.whole(part) for part in parts], lambda function: function)
    mode = spmd.DataParallel(style)
    got, programs = two_steps(case, [part[rank] for part in parts], spmd.compile(parallel_mode=mode))
    return all_unequal(expected, got, rank, world), programs


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_one_step_accumulates_and_another_updates(ranks: Ranks, style: str) -> None:
    for found, programs in ranks.run(2, differences_of_two_steps, style):
        assert found == []
        assert programs == 4 + 1  # without and with gradients, each without and with optimizer state; one that updates


def compiled_case(case: Case, passes: Any = (), **options: Any) -> spmd.CompiledStep:
    mode = spmd.DataParallel(**options)
    step: spmd.CompiledStep = compile_on_fake_ranks(
        4, case.step, case.build(), *case.part(0, 0), parallel_mode=mode, passes=passes
    )
    return step


@pytest.mark.parametrize("reduce, times", [("once", 1), ("each", 4)])
def test_a_split_gradient_is_reduced_once_or_each_time(reduce: str, times: int) -> None:
    compiled = compiled_case(Stacked(), None, parallel_style="fully_shard", input_batch_dim=1, reduce_gradients=reduce)
    unmerged = compiled_case(Stacked(), parallel_style="fully_shard", input_batch_dim=1, reduce_gradients=reduce)
    assert counts(unmerged) == {"all_gather": 4, "reduce_scatter": 4 * times, "all_reduce": 1}
    assert compiled.report().bytes("reduce_scatter") == unmerged.report().bytes("reduce_scatter")


@pytest.mark.parametrize("reduce", ["once", "each"])
def test_a_replicated_gradient_is_reduced_once(reduce: str) -> None:
    compiled = compiled_case(Stacked(), parallel_style="replicate", input_batch_dim=1, reduce_gradients=reduce)
    assert counts(compiled) == {"all_reduce": 4 + 1}


def test_parts_cut_from_the_batch_cost_one_gather_of_it_and_nothing_whole_is_computed() -> None:
    compiled = compiled_case(Chunks(), parallel_style="replicate")
    assert counts(compiled) == {"all_gather": 2, "all_reduce": 4 + 1}
    assert compiled.report().bytes("all_gather") == 8 * 8 * (15 + 4)
    assert {shape for shape in shapes(compiled.program, "forward") if shape in ((32, 17), (8, 17))} == set()
    assert any("so its rows are gathered first" in note for note in compiled.program.notes)


def test_a_way_to_reduce_that_there_is_not() -> None:
    with pytest.raises(ValueError, match='expected reduce_gradients to be one of "once", "each", got \'never\''):
        spmd.DataParallel("fully_shard", reduce_gradients="never")  # type: ignore[arg-type]
