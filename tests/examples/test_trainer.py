"""The example of a trainer class: it learns, with one program, and computes what its plain step does."""

from __future__ import annotations

import copy

import pytest
import torch
import trainer

from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("alone")
def test_it_learns_with_one_program() -> None:
    made = trainer.make(width=16)
    first = 10 * made.fit(1)  # the average starts at zero
    assert made.fit(60) < first / 3
    assert made.steps == 61 and len(made.train_step.programs) == 1


def losses(rank: int, world: int) -> list[tuple[float, float]]:
    """Of the compiled step on this rank's rows, and of the plain one on the rows of all ranks."""
    made = trainer.make(width=16)
    plain = copy.deepcopy(made)
    found = []
    for k in range(3):
        x = torch.rand(4 * world, 1, generator=torch.Generator().manual_seed(k))
        rows = slice(4 * rank, 4 * rank + 4)
        got = made.train_step({"x": x[rows], "y": x[rows] ** 2})
        found.append((float(got), float(trainer.Trainer.train_step.__wrapped__(plain, {"x": x, "y": x**2}))))
    return [*found, (float(made.average), float(plain.average))]


def test_losses_are_those_of_one_device(ranks: Ranks) -> None:
    for found in ranks.run(2, losses):
        for got, expected in found:
            assert got == pytest.approx(expected, rel=1e-4)
