"""Rows read and written by a number in Python that counts calls: one program serves all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

FORMS = 9


class Queues(nn.Module):
    """A linear layer, and one buffer of four rows for each form of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("queues", torch.zeros(FORMS, 4, 4, dtype=torch.float64))
        self.register_buffer("bank", torch.zeros(24, 4, dtype=torch.float64))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        near = h @ self.bank.clone().t()
        start = self.seen * len(h) % 24
        self.bank[start : start + len(h)] = h.detach()  # rows of all ranks
        self.bank[start : start + 2] *= 0.5
        row, at = h.detach().mean(0), self.seen % 4
        first, tuple_, copied, sliced, selected, column, added, one, from_end = self.queues
        first[at] = row
        tuple_[at, :] = row
        copied[at].copy_(row)
        sliced[at : at + 1] = row
        selected.select(0, at).copy_(row)
        column[..., at] += row
        added[:, None, at][1:] += 2 * row[:3, None]
        one[at, (self.seen + 1) % 4] += row.sum()
        from_end[-1 - at] = h[at].detach()
        self.seen += 1
        taken = h[at : at + 1] * self.bank.narrow(0, start, 2)
        return h @ self.queues.sum(0) * self.layer.weight[at] + near.mean() + taken.sum()


@dataclass(frozen=True)
class Queued(Case):
    def build(self) -> tuple[Any, ...]:
        model = Queues()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return (torch.randn(4, 4, generator=random_generator(rank, step), dtype=torch.float64),)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("style", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard"])
def test_the_numbers_of_the_plain_step(ranks: Ranks, style: str) -> None:
    assert_agrees(ranks, 2, Queued(), style, steps=6)


@pytest.mark.usefixtures("alone")
def test_one_program_serves_all_calls() -> None:
    case = Queued()
    objects, step = case.build(), spmd.compile(case.step)
    for k in range(6):
        step(*objects, *case.part(0, k))
    assert len(step.programs) == 1


@pytest.mark.usefixtures("alone")
def test_a_row_beyond_the_last_raises_as_it_does_in_eager_and_changes_nothing() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", torch.zeros(2, 3))
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows[self.seen] = x
            self.seen += 1
            return self.rows.sum()

    model = Writer()
    step = spmd.compile(lambda model, x: model(x))
    for expected in (3.0, 6.0):
        assert step(model, torch.ones(3)).item() == expected
    with pytest.raises(IndexError, match="index 2 is out of bounds"):
        step(model, torch.full((3,), 7.0))
    assert model.seen == 2
    assert model.rows.eq(1).all()
