"""A checkpoint of any layout loads into any other, bit by bit, and training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import spmd
from tests.harness.pool import Ranks

from .runs import LAYOUTS, Run, unequal, whole

COMPILED = ("replicate", "fully_shard", "shard_optimizer", "annotated")  # the others are as materialized


def saved(rank: int, world: int, layout: str, folder: Path) -> None:
    run = Run(layout, on_meta=layout not in COMPILED)
    if layout in COMPILED:
        run.train(rank, 0, 2)
    else:
        run.update()
    spmd.save(folder / layout, step=2, **run.objects)
    state = run.state()
    if rank == 0:
        torch.save(state, folder / f"{layout}.pt")


def loaded(rank: int, world: int, layout: str, folder: Path) -> list[str]:
    """What differs after each load, first into what was never trained, then into what has the state of another."""
    run = Run(layout, seed=1, on_meta=True)
    wrong = []
    for other in LAYOUTS:
        assert spmd.load(folder / other, **run.objects) == 2
        wrong += [f"{other} into {layout}: {name}" for name in unequal(torch.load(folder / f"{other}.pt"), run.state())]
    return wrong


def test_every_layout_loads_from_every_other(ranks: Ranks, tmp_path: Path) -> None:
    for layout, world in LAYOUTS.items():
        ranks.run(world, saved, layout, tmp_path)
    for layout, world in LAYOUTS.items():
        assert ranks.run(world, loaded, layout, tmp_path) == [[]] * world


def resumed(rank: int, world: int, layout: str, optimizer: str, is_new: bool, folder: Path) -> list[str]:
    """What differs between a run of four steps and one that is interrupted after two."""
    run = Run(layout, optimizer)
    run.train(rank, 0, 2)
    spmd.save(folder, **run.objects)
    expected = run.train(rank, 2, 4)
    other = Run(layout, optimizer, seed=1, on_meta=is_new and layout == "fully_shard")
    if not is_new:
        other.train(rank, 7, 8)
    assert spmd.load(folder, **other.objects) is None
    got = other.train(rank, 2, 4)
    assert len(other.step.programs) == 1
    losses = [*zip(expected, got, strict=True)]
    return unequal(run.state(), other.state()) + [str(each) for each in losses if not torch.equal(*each)]


@pytest.mark.parametrize("layout, optimizer, is_new", [
    ("fully_shard", "Adafactor", True),
    ("fully_shard", "SGD", False),
    ("replicate", "Muon", True),
    ("shard_optimizer", "Adam", True),
], ids=lambda each: str(each))  # fmt: skip
def test_a_run_goes_on_with_the_same_bits(
    ranks: Ranks, layout: str, optimizer: str, is_new: bool, tmp_path: Path
) -> None:
    assert ranks.run(2, resumed, layout, optimizer, is_new, tmp_path) == [[], []]


def by_torch(rank: int, world: int, folder: Path) -> list[str]:
    """What differs after torch's own ways to save: gathered on rank 0, by DCP, and each rank's own parts."""
    run, other = Run("fully_shard"), Run("fully_shard", seed=1, on_meta=True)
    run.train(rank, 0, 1)
    model, wrong = run.model, []
    expected = {name: whole(value) for name, value in model.state_dict().items()}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    wrong += unequal(expected if rank == 0 else {}, full)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "dcp")
    torch.save(model.state_dict(), folder / f"{rank}.pt")
    by_dcp = get_model_state_dict(other.model)
    dcp.load({"model": by_dcp}, checkpoint_id=folder / "dcp")
    for state_dict in (by_dcp, torch.load(folder / f"{rank}.pt", weights_only=False)):
        other.model.load_state_dict(state_dict)
        wrong += unequal(expected, {name: whole(value) for name, value in other.model.state_dict().items()})
    return wrong


def test_torch_saves_compiled_models_too(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, by_torch, tmp_path) == [[], []]
