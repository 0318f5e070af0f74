"""Entries of a capture alone: a later process runs no trace, and partition and passes anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spmd

from .test_warm import run
from .trainer import Trainer
from .trainer import trainer as trainer

pytestmark = pytest.mark.slow


def transformed(graph: Any, *_: Any) -> Any:
    return graph


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("why, options", [
    ("its sums have an order", {"parallel_mode": spmd.DataParallel(bits="same", virtual=2)}),
    ("it defers updates", {"parallel_mode": spmd.DataParallel("replicate", defer_updates=True)}),
    ("it has a budget of memory", {"memory": "1GB"}),
    ("it has a gm_transformation", {"gm_transformation": transformed}),
    ("it has a backend of the user's", {"backend": lambda module, inputs: module}),
])  # fmt: skip
def test_a_second_process_runs_no_trace(
    trainer: Trainer, tmp_path: Path, why: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """``cache="verify"`` compares the capture, for whichever reason it is kept alone: of each with --exhaustive."""
    traces, cache = trainer.count_traces(), tmp_path / "cache"
    cold, expected = run(trainer, cache, **options)
    assert f"what follows the trace is not kept for later processes: {why}" in "".join(cold.report().notes)
    assert len(traces) == 2
    traces.clear()
    warm, got = run(trainer, cache, **options)
    assert not traces, warm.report().notes
    assert got == expected
    assert warm.report().notes == cold.report().notes
    if why != "it defers updates" and not request.config.getoption("--exhaustive"):
        return
    _, verified = run(trainer, f"verify:{cache}", **options)
    assert verified == expected
    assert len(traces) == 2
