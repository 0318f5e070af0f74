"""State that ranks on two hosts save, other ranks on two hosts load, in another layout, and train on from there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd
from tests.harness.oracle import all_unequal, snapshot
from tests.harness.pool import Ranks

from .layouts import BY_ADAMW, LAYOUTS, Layout

PARTS = 4  # of each batch, of which a rank has one or several
SAVED, ENDED = 2, 4  # calls


def layout_of(name: str) -> Layout:
    return replace(LAYOUTS[name], case=BY_ADAMW)


def train(layout: Layout, rank: int, objects: tuple[Any, ...], calls: range) -> Any:
    """The result of the last of these calls."""
    step = spmd.compile(layout.case.step, parallel_mode=layout.mode())
    divided = len({layout.part_of(other) for other in range(layout.world)})
    own = range(PARTS)[layout.part_of(rank) * PARTS // divided :][: PARTS // divided]
    results = [step(*objects, *layout.case.whole([layout.case.part(k, call) for k in own])) for call in calls]
    return results[-1]


def begin(rank: int, world: int, name: str, folder: Path) -> None:
    layout = layout_of(name)
    torch.manual_seed(0)
    model, optimizer = layout.case.build()
    train(layout, rank, (model, optimizer), range(SAVED))
    spmd.save(folder, step=SAVED, model=model, optimizer=optimizer)


def go_on(rank: int, world: int, name: str, folder: Path) -> list[str]:
    """What differs from plain training on one device."""
    layout = layout_of(name)
    torch.manual_seed(1)
    model, optimizer = layout.case.build()
    assert spmd.load(folder, model=model, optimizer=optimizer) == SAVED
    result = train(layout, rank, (model, optimizer), range(SAVED, ENDED))
    torch.manual_seed(0)
    plain = layout.case.build()
    for call in range(ENDED):
        expected = layout.case.step(*plain, *layout.case.whole([layout.case.part(k, call) for k in range(PARTS)]))
    return all_unequal([snapshot(expected, plain)], [snapshot(result, (model, optimizer))], rank, world)


@pytest.mark.parametrize("saving, loading", [
    pytest.param("replicate over hosts, shard inside", "shard_optimizer", marks=pytest.mark.exhaustive),
    ("tensor over hosts", "fully_shard, four"),
    ("fully_shard", "stages over hosts"),
])  # fmt: skip
def test_what_two_hosts_save_two_hosts_load(hosts: Ranks, saving: str, loading: str, tmp_path: Path) -> None:
    hosts.run(LAYOUTS[saving].world, begin, saving, tmp_path)
    for differ in hosts.run(LAYOUTS[loading].world, go_on, loading, tmp_path / f"step-{SAVED}"):
        assert not differ
