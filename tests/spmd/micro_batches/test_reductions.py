"""Sums over ranks that all micro-batches need are known from the first one on: a step reduces as often as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes.ir.micro_batches import REDUCED_ONCE
from tests.harness.fake import fake_world

from .test_numbers import batch, verified


def finish(loss: Tensor, optimizer: Any) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def ignores(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    labels = torch.where(y[:, 0] > 0.3, 1, -100)
    return finish(F.cross_entropy(model(x), labels, ignore_index=-100), optimizer)


def counts_twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Two masked means, whose counts are needed at once; and a count of activations, known only at the end."""
    predicted, mask = model(x), y[:, 0] > 0
    errors = (predicted - y).square().mean(1)
    losses = (errors * mask).sum() / mask.sum(), (errors * ~mask).sum() / (~mask).sum()
    right = (predicted.argmax(1) == y.argmax(1)).sum()
    return finish(losses[0] + losses[1], optimizer), right, mask.sum()


def normalizes(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """A sum that is needed for the next one, and both by each micro-batch."""
    centered = y - y.mean(0)
    deviation = centered.square().mean(0).sqrt()
    loss = F.mse_loss(model(x), centered / deviation)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return finish(loss, optimizer)


STEPS = (ignores, counts_twice, normalizes)


def compiled(step: Any, **mode: Any) -> Any:
    """The step on the first of two ranks, after one call."""
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with fake_world(2):
        found = spmd.compile(step, parallel_mode=spmd.DataParallel(**mode))
        found(model, torch.optim.SGD(model.parameters(), lr=0.1), *batch(8))
    return found


MODES: list[dict[str, Any]] = [{"parallel_style": "replicate"}, {"parallel_style": "fully_shard"}, {"bits": "same"}]
USUAL = [(normalizes, MODES[0]), (ignores, MODES[1]), (counts_twice, MODES[1]), (counts_twice, MODES[2])]
# Parts that need sums of all are computed together where bits are the same.
ALL = [(step, mode) for step in STEPS for mode in MODES if step is not normalizes or "bits" not in mode]


@pytest.mark.parametrize(
    ("step", "mode"), [pytest.param(*each, marks=[pytest.mark.exhaustive] * (each not in USUAL)) for each in ALL]
)
def test_a_step_reduces_as_often_as_with_the_whole_batch(step: Any, mode: dict[str, Any]) -> None:
    once, four = (compiled(step, micro_batches=count, **mode).report() for count in (1, 4))
    for kind in ("all_reduce", "reduce_scatter"):
        assert four.count(kind) == once.count(kind), kind


def test_what_is_reduced_ahead_is_handed_on_by_the_first_micro_batch() -> None:
    """The counts are one message there; the other runs do not read the rows of the whole batch any more."""
    program = compiled(counts_twice, micro_batches=4).program
    first, *others = program.in_order()
    assert [node.meta["val"].numel() for node in first.collectives()] == [2]
    assert [len(list(each.collectives())) for each in others[:-1]] == [0, 0]
    kept = [each.name for each in first.inputs if each.role is REDUCED_ONCE]
    assert [each.name for each in others[-1].inputs if each.role is REDUCED_ONCE] == kept == ["reduced.0"]
    for each in others:
        nodes = dict(zip((one.name for one in each.inputs), each.placeholders, strict=True))
        assert not nodes["all of y"].users


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step, rows", [(counts_twice, 10), (normalizes, 12)])
@pytest.mark.parametrize("gathers", ["once", "each"])
@pytest.mark.in_turn("gathers")
def test_numbers(step: Any, rows: int, gathers: str) -> None:
    """Beside parameters that are gathered once; the last of three micro-batches of five rows is shorter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    found = verified(step, model, rows, micro_batches=3, parallel_style="fully_shard", gather_parameters=gathers)
    assert found, found


@pytest.mark.usefixtures("alone")
def test_certificate() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    step = spmd.compile(counts_twice, parallel_mode=spmd.DataParallel(micro_batches=3))
    found = spmd.certify(step, model, torch.optim.SGD(model.parameters(), lr=0.1), *batch(12), world=2)
    assert found, found
