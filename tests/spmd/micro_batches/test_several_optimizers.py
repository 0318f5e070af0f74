"""Several optimizers and one ``GradScaler`` in a step of micro-batches, beside the plain step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd

pytestmark = pytest.mark.usefixtures("alone")
CALM = 50  # the second model sees no larger values


def objects() -> tuple[Any, ...]:
    torch.manual_seed(0)
    one, two = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    return one, two, torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.Adam(two.parameters(), lr=0.1), scaler


def batch(seed: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    """Rows, of which one overflows in the first model, but for those of the last call."""
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, n, generator=draw, dtype=torch.float64) for n in (5, 3))
    x[seed % rows] = float("inf") if seed % 3 else 1.0
    return x, y


def finish(scaler: Any, *optimizers: Any) -> None:
    for each in optimizers:
        scaler.step(each)
    scaler.update()
    for each in optimizers:
        each.zero_grad()


def together(one: Any, two: Any, first: Any, second: Any, scaler: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    losses = F.mse_loss(one(x), y), F.mse_loss(two(x.clamp(-CALM, CALM)), y)
    scaler.scale(losses[0] + losses[1]).backward()
    finish(scaler, first, second)
    return losses


def in_turn(one: Any, two: Any, first: Any, second: Any, scaler: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The second model computes behind the update of the first one, which it does not read; both are clipped."""
    losses = []
    for model, optimizer in ((one, first), (two, second)):
        losses.append(F.mse_loss(model(x if model is one else x.clamp(-CALM, CALM)), y))
        scaler.scale(losses[-1]).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
    scaler.update()
    first.zero_grad()
    second.zero_grad()
    return tuple(losses)


# Each runs once in every run: one beside its counts and the scale, the other on simulated ranks.
@pytest.mark.parametrize("step", [together, pytest.param(in_turn, marks=pytest.mark.exhaustive)])
def test_a_scaler_skips_one_of_them(step: Callable[..., Any]) -> None:
    found = []
    for each in (step, spmd.compile(step, parallel_mode=spmd.DataParallel(micro_batches=3))):
        given = objects()
        one, two, _, second, scaler = given
        losses = [each(*given, *batch(seed, 10 if seed == 3 else 12)) for seed in range(4)]
        moved = int(second.state_dict()["state"][0]["step"])
        found.append([losses, one.state_dict(), two.state_dict(), scaler.get_scale(), moved])
    torch.testing.assert_close(found[1], found[0], equal_nan=True)
    assert found[0][-1] == 4 and found[0][-2] == 4.0  # the second one steps in each call; two calls halve the scale


@pytest.mark.slow
@pytest.mark.parametrize("step", [pytest.param(together, marks=pytest.mark.exhaustive), in_turn])
def test_ranks_skip_the_same(step: Callable[..., Any]) -> None:
    compiled = spmd.compile(step, parallel_mode=spmd.DataParallel("fully_shard", micro_batches=3))
    found = spmd.verify(compiled, *objects(), *batch(0), world=2, steps=2)
    assert found, found


def adversarial(one: Any, two: Any, first: Any, second: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
    """The first model learns from the second one, which has been updated."""
    scaler.scale(F.softplus(two(x)).mean()).backward()
    scaler.step(second)
    loss = F.softplus(-two(F.pad(one(x), (0, 2)))).mean()
    scaler.scale(loss).backward()
    finish(scaler, first)
    return loss


def test_what_reads_an_update_is_refused_at_its_line() -> None:
    step = spmd.compile(adversarial, parallel_mode=spmd.DataParallel(micro_batches=3))
    expected = r"updates parameters that .*loss = F.softplus\(-two.*reads afterwards.*Compile what follows the update"
    with pytest.raises(spmd.PartitionError, match=expected):
        step(*objects(), *batch(0))
