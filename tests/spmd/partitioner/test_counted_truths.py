"""``any`` and ``all`` over rows are counts: no rank gathers elements for them, and micro-batches add up theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spmd
from passes import Kind
from tests.harness.fake import fake_world

TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda x: (x > 1).any(),
    "all": lambda x: (x > -1).all(),
    "of floats": lambda x: torch.any(x) & torch.all(x),
    "of NaN": lambda x: torch.stack([(x * torch.nan).any(), (x * torch.nan).all()]),
    "of rows": lambda x: (x > 0.5).any(0),
    "kept": lambda x: (x > -1).all(0, keepdim=True),
    "of dims": lambda x: torch.any(x > 2, dim=(0, 1)),
    "of the last from behind": lambda x: torch.all(x > -2, dim=(-2, -1)),
    "of bytes": lambda x: (x > 1).to(torch.uint8).any(0),
    "equal": lambda x: torch.isclose(x, x.round()).all(),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_truth_of_the_whole_batch(micro_batches: int) -> None:
    @spmd.compile(parallel_mode=spmd.DataParallel(micro_batches=micro_batches))
    def step(x: Tensor) -> list[Tensor]:
        return [truth(x) for truth in TRUTHS.values()]

    x = torch.tensor([[0.0, 3.0], [0.2, 0.3], [0.0, 0.7], [-0.5, 0.1]], dtype=torch.float64)
    expected = [truth(x) for truth in TRUTHS.values()]
    with fake_world(2):
        verdict = spmd.verify(step, x, world=2)
        assert verdict, verdict
        step(x[:2])
        assert {row.kind for row in step.report().every} == {Kind.ALL_REDUCE}
    with fake_world(1):
        found = step(x)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("alone")
def test_a_look_at_each_gradient_gathers_none() -> None:
    @spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).square().mean().backward()
        if not any(p.grad.isnan().any() for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()

    def without(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    gathers = []
    with fake_world(2):
        for each in (step, spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(without)):
            each(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 4))
            gathers.append(sum(row.kind is Kind.ALL_GATHER for row in each.report().every))
    assert gathers[0] == gathers[1]
