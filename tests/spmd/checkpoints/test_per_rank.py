"""State that each rank has for itself, such as the place of its data loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from tests.harness.pool import Ranks


class Loader:
    """A loader that is at some place in some order."""

    def __init__(self, place: int) -> None:
        self.state: dict[str, Any] = {"place": place, "order": torch.arange(place, place + 3)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def saves(rank: int, world: int, folder: Path, wait: bool) -> None:
    loader, seen = Loader(10 * rank), [rank, {"rows": torch.full((2,), rank)}]
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    spmd.save(folder, model=model, wait=wait, per_rank={"loader": loader, "seen": seen}).wait()
    other, kept, loaded = Loader(-1), [None], nn.Linear(2, 2)
    spmd.load(folder, model=loaded, per_rank={"loader": other, "seen": kept})
    assert torch.equal(loaded.weight, model.weight)
    assert other.state["place"] == 10 * rank and torch.equal(other.state["order"], loader.state["order"])
    assert kept[0] == rank and torch.equal(kept[1]["rows"], seen[1]["rows"])  # type: ignore[index]
    with pytest.raises(ValueError, match="other missing in the checkpoint"):
        spmd.load(folder, model=loaded, per_rank={"other": loader})
    with pytest.raises(ValueError, match="expected per_rank on all ranks, or on none"):
        spmd.save(folder, model=model, per_rank={"loader": loader} if rank else None)


@pytest.mark.parametrize("wait", [True, False])
def test_each_rank_loads_what_it_saved(ranks: Ranks, tmp_path: Path, wait: bool) -> None:
    ranks.run(2, saves, tmp_path, wait)
    assert ranks.run(1, loads_on_one, tmp_path) == [True]


def loads_on_one(rank: int, world: int, folder: Path) -> bool:
    model, loader = nn.Linear(2, 2), Loader(-1)
    nn.init.zeros_(model.weight)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"per_rank was saved by 2 ranks, and 1 load it"):
        spmd.load(folder, model=model, per_rank={"loader": loader})
    assert torch.equal(model.weight, before) and loader.state["place"] == -1
    spmd.load(folder, model=model)
    return not torch.equal(model.weight, before)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("given, message", [
    (Loader(0), r"to have state_dict and load_state_dict, or to be a dict or a list"),
    ({"other": object()}, "cannot be saved"),
    ({"large": torch.zeros(70_000_000, dtype=torch.uint8)}, "at most 64 MB"),
])  # fmt: skip
def test_what_cannot_be_saved_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        spmd.save(tmp_path, per_rank={"loader": given.state_dict if isinstance(given, Loader) else given})
    spmd.save(tmp_path, model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="saved without it"):
        spmd.load(tmp_path, model=nn.Linear(2, 2), per_rank={"loader": Loader(0)})
