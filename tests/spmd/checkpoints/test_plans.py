"""Which rank writes what is planned once for a layout: the next save of the same one writes what is there then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spmd
from spmd.checkpoints import storage
from tests.harness.pool import Ranks

from .runs import Run, unequal


def planned(rank: int, world: int, folder: Path) -> tuple[list[int], list[str]]:
    """How many plans have been made after each of several saves, and what is wrong with what then loads."""
    plan, plans, counts, wrong = storage._plan, list[int](), [], list[str]()

    def counted(*args: Any) -> None:
        plans.append(1)
        plan(*args)

    def save_and_load(run: Run, wait: bool = True) -> None:
        run.update()
        spmd.save(folder, wait=wait, **run.objects).wait()
        counts.append(len(plans))
        other = Run(run.layout, seed=1, on_meta=True)
        spmd.load(folder, **other.objects)
        wrong.extend(unequal(run.state(), other.state()))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(storage, "_plan", counted)
        patched.setattr(storage, "_last", None)
        sharded, whole = Run("fully_shard", on_meta=True), Run("replicate", on_meta=True)
        save_and_load(sharded)
        save_and_load(sharded, wait=False)
        save_and_load(Run("fully_shard", seed=2, on_meta=True))  # other tensors in the same layout
        save_and_load(whole)
        save_and_load(whole)
        if rank == 1:
            patched.setattr(storage, "_last", None)
        save_and_load(whole)
        save_and_load(sharded)
        if rank == 0:  # each knows a plan of this layout, and not the same one
            patched.setattr(storage, "_last", storage._Plan(storage._last.layout, "another", {}))
        save_and_load(sharded)
    return counts, wrong


def test_a_plan_is_made_once_for_a_layout(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, planned, tmp_path) == [([1, 1, 1, 2, 2, 3, 4, 5], [])] * 2
