"""State that a call left partly updated is refused in a later process group, too, until it is whole again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import spmd
from tests.harness.pool import Ranks

from . import faults
from .faults import Fault
from .test_failed_calls import Trial, clone


def in_a_new_group(rank: int, world: int, store: Path, way_out: str) -> tuple[list[str], list[str]]:
    """Rank 1 fails after its first writes; then the group is another. The messages, and what differs at the end."""
    trial = Trial(rank, world, "replicate")
    for k in range(2):
        trial.call(k)
    saved = tree_map(clone, [each.state_dict() for each in trial.objects])
    error, _ = trial.failing(2, Fault(faults.raises, 0.999) if rank == 1 else None)
    ended = [""] * world
    dist.all_gather_object(ended, error)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    if way_out == "after another model":  # whose ranks are connected already
        other = spmd.compile(lambda model, x: model(x).sum())
        other(torch.nn.Linear(2, 2), torch.ones(2, 2))
    messages = [trial.failing(2, None)[0] for _ in range(2)]
    if way_out == "recover":
        trial.step.recover()
    else:
        for each, state in zip(trial.objects, saved, strict=True):
            each.load_state_dict(state)
    done = 3 if way_out == "recover" and not ended[0] else 2
    for k in range(done, 4):
        result: Any = trial.call(k)
    return messages, trial.unequal(4, result)


@pytest.mark.parametrize("way_out", ["recover", "load", "after another model"])
def test_a_partly_updated_model_is_refused_in_a_new_group(ranks: Ranks, tmp_path: Path, way_out: str) -> None:
    (one, differ), (other, differ_too) = ranks.run(2, in_a_new_group, tmp_path / "store", way_out, timeout=120)
    assert all("StateError" in message or "RankFailedError" in message for message in (*one, *other))
    assert all("partly updated" in message for message in (*one, *other))
    assert "rank 1: partly updated" in one[1] and "recover()" in one[1] and "checkpoint" in one[1]
    assert differ == differ_too == []


def loads_at_once(rank: int, world: int) -> list[str]:
    """Rank 1 fails after its first writes, and both ranks load a checkpoint as soon as they know."""
    trial = Trial(rank, world, "fully_shard")
    for k in range(2):
        trial.call(k)
    saved = tree_map(clone, [each.state_dict() for each in trial.objects])
    error, _ = trial.failing(2, Fault(faults.raises, 0.999) if rank == 1 else None)
    if not error:
        assert "RankFailedError" in trial.failing(2, None)[0]
    for each, state in zip(trial.objects, saved, strict=True):
        each.load_state_dict(state)
    for k in range(2, 4):
        result: Any = trial.call(k)
    return trial.unequal(4, result)


def test_a_checkpoint_that_is_loaded_at_once_is_accepted(ranks: Ranks) -> None:
    assert ranks.run(2, loads_at_once, timeout=120) == [[], []]
