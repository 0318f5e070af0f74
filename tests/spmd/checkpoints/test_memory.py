"""Beside its shards, a rank needs a small buffer to save, nothing to load, and one whole tensor to export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import spmd
from spmd.checkpoints import export, storage
from tests.harness.memory import allocate_without_holes, idle_bytes, sampled_peak_bytes
from tests.harness.pool import Ranks

LAYERS, WIDTH = 12, 1024
LAYER = WIDTH * WIDTH * 4  # bytes
PYTHON = LAYER // 8  # what it takes; the buffer that files are written from is shared memory
ALLOWED = {"save": PYTHON, "save in the background": PYTHON, "load": PYTHON, "export": LAYER + PYTHON}


def added(rank: int, world: int, folder: Path) -> dict[str, int]:
    """The most bytes that each call adds to what this rank has between calls."""
    allocate_without_holes()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    spmd.materialize(model, spmd.DataParallel("fully_shard"))
    step = spmd.compile(lambda model: sum(p.sum() for p in model.parameters()))
    step(model)  # of whose state a save in the background makes no copy
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: spmd.save(folder / "save", model=model),
        "save in the background": lambda: spmd.save(folder / "save", model=model, wait=False).wait(),
        "load": lambda: spmd.load(folder / "save", model=model),
        "export": lambda: spmd.export(folder / "export", model),
    }
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage, "_LEAST", LAYER)
        patched.setattr(export, "_LEAST", LAYER)
        for name, call in calls.items():
            call()
            before = idle_bytes()
            found[name] = sampled_peak_bytes(call) - before
    assert len(step.programs) == 1
    return found


def test_peaks(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(2, added, tmp_path):
        assert {name: each for name, each in found.items() if each > ALLOWED[name]} == {}, found
