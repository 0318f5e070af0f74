"""The loop of accelerate in the examples has the numbers of one device, and its checkpoints are read at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ...harness.pool import Ranks
from .launched import launched

pytest.importorskip("accelerate")
pytestmark = pytest.mark.processes

Found = tuple[list[float], dict[str, Tensor]]


def trained(folder: Path, batch: int, first: int, epochs: int) -> Found:
    """The losses of ``epochs``, behind a checkpoint if ``first`` is not 0, and the whole state dict after them."""
    from accelerate_loop import Run

    run = Run(rows=36, batch=batch, dtype=torch.float64)
    if first:
        run.accelerator.load_state(folder)
    losses = [run.epoch(seed) for seed in range(first, first + epochs)]
    if not first:
        run.accelerator.save_state(folder)
    assert len(run.step.programs) <= 3  # without state and with, and one for a cache that accelerate fills
    return losses, run.accelerator.get_state_dict(run.model)


def job(rank: int, world: int, *args: Any) -> Found:
    with launched(rank, world):
        return trained(*args)


def assert_equal(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-11)


def test_a_loop_of_accelerate_trains_and_resumes_as_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    (before,) = ranks.run(1, job, tmp_path / "one", 12, 0, 1)
    (after,) = ranks.run(1, job, tmp_path / "one", 12, 1, 1)
    for found in ranks.run(2, job, tmp_path / "two", 6, 0, 1):
        assert_equal(found, before)
    for found in ranks.run(2, job, tmp_path / "one", 6, 1, 1):  # what one rank wrote
        assert_equal(found, after)
