"""Ranks killed at random moments of a run that saves all the time: nothing torn, nothing lost that was saved."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd.ranks import failures
from tests.harness.pool import RankError, Ranks

STEPS = 1000


def endless(rank: int, world: int, folder: Path, victim: int, seconds: float) -> None:
    """Go on from the newest checkpoint, and save each step. The state of step k is the number k everywhere."""
    failures._PATIENCE = 0.1  # for reasons that nobody has; the process is replaced
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    spmd.materialize(model, spmd.DataParallel("fully_shard"))
    progress: dict[str, Any] = {"step": 0}
    if any(folder.glob("step-*/checkpoint.json")):
        spmd.load(folder, model=model, progress=progress)
    if rank == victim:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    for step in range(progress["step"] + 1, STEPS):
        progress["step"] = step
        for parameter in model.parameters():
            parameter.data.fill_(step)
        spmd.save(folder, step=step, keep=2, model=model, progress=progress)
        (folder / f"saved-{rank}").write_text(str(step))
        time.sleep(0.002)


def test_no_kill_loses_a_step_that_was_saved(ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    draw = random.Random(0)
    for _ in range(200 if request.config.getoption("--exhaustive") else 10):
        with pytest.raises(RankError, match="exit code -9"):
            ranks.run(2, endless, tmp_path, draw.randrange(2), draw.uniform(0.0, 0.4), grace=30.0)
        if not any(tmp_path.glob("saved-*")):
            continue  # killed before the first save had ended
        model, progress = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), dict[str, Any]()
        step = spmd.load(tmp_path, model=model, progress=progress)
        assert progress == {"step": step} and all(bool((p == step).all()) for p in model.parameters())
        assert step is not None and step >= max(int(path.read_text() or 0) for path in tmp_path.glob("saved-*"))
    assert step is not None and step > 10
