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

STEPS = 10000


def endless(rank: int, world: int, folder: Path, victim: int, seconds: float, in_background: bool, saves: int) -> None:
    """Go on from the newest checkpoint, and save each step. The state of step k is the number k everywhere.

    The rank ``victim`` is killed so many seconds after it has made so many saves.
    """
    failures._PATIENCE = 0.1  # for reasons that nobody has; the process is replaced
    mode = spmd.DataParallel("fully_shard")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    spmd.materialize(model, mode)
    progress: dict[str, Any] = {"step": 0}
    update = spmd.compile(add_one, parallel_mode=mode) if in_background else add_one  # compiled, state is not copied
    update(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    if any(folder.glob("step-*/checkpoint.json")):
        spmd.load(folder, model=model, progress=progress)
    for made, step in enumerate(range(progress["step"] + 1, STEPS)):
        if rank == victim and made == saves:
            timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        progress["step"] = step
        update(model)
        spmd.save(folder, step=step, keep=2, wait=not in_background, model=model, progress=progress)
        (folder / f"saved-{rank}").write_text(str(step - in_background))  # the one before is complete
        time.sleep(0.002)


def add_one(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


@pytest.mark.timeout(7200)  # with --exhaustive
def test_no_kill_loses_a_step_that_was_saved(ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    draw, within, kills = random.Random(0), 0, 200 if request.config.getoption("--exhaustive") else 6
    for k in range(kills):
        with pytest.raises(RankError, match="exit code -9"):
            place = draw.randrange(2), draw.uniform(0.0, 0.4), k % 4 == 1, 0 if k % 4 == 3 else 2
            ranks.run(2, endless, tmp_path, *place, grace=60.0)
        if not any(tmp_path.glob("saved-*")):
            continue  # killed before the first save had ended
        model, progress = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), dict[str, Any]()
        step = spmd.load(tmp_path, model=model, progress=progress)
        assert progress == {"step": step} and all(bool((p == step).all()) for p in model.parameters())
        assert step is not None and step >= max(int(path.read_text() or 0) for path in tmp_path.glob("saved-*"))
        within += len([*tmp_path.glob("step-*/data-*")]) > len([*tmp_path.glob("step-*/checkpoint.json")])
    assert step is not None and step > kills // 2
    assert within > 20 or kills < 200, "ranks are killed within a save"
    print(f"{within} of {kills} kills left a save that was not complete, in {step} steps")
