"""Batches and numbers on which all ranks agree between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spmd
from tests.harness.pool import Ranks


def drawn(rank: int, world: int) -> tuple[list[float], list[float], str]:
    first, second = spmd.shared_rng(), spmd.shared_rng(7)
    try:
        spmd.shared_rng(rank)
    except ValueError as error:
        return [first.random() for _ in range(3)], [second.random()], str(error)
    return [], [], "nothing was raised"


def test_a_shared_generator_draws_the_same_on_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.run(2, drawn)
    assert one == other
    assert len(set(one[0])) == 3 and one[1] != one[0][:1]
    assert "one seed on all ranks" in one[2] and "[0, 1]" in one[2]


def padded(rank: int, world: int) -> Any:
    batch = {
        "ids": torch.full((2, 3 + rank), 5),
        "labels": torch.full((2, 4 - rank), 6),
        "pixels": [torch.ones(2, 2 + rank, 3)],
        "rows": torch.zeros(2),
        "names": "x",
    }
    return spmd.pad_to_longest(batch, values={"labels": -100})


def test_batches_are_padded_to_the_longest_of_all_ranks(ranks: Ranks) -> None:
    one, other = ranks.run(2, padded)
    assert one["ids"].tolist() == [[5, 5, 5, 0]] * 2 and other["ids"].tolist() == [[5, 5, 5, 5]] * 2
    assert one["labels"].tolist() == [[6] * 4] * 2 and other["labels"].tolist() == [[6, 6, 6, -100]] * 2
    assert one["pixels"][0].shape == other["pixels"][0].shape == (2, 3, 3)
    assert one["pixels"][0][:, 2].tolist() == [[0.0] * 3] * 2
    assert one["rows"].shape == (2,) and one["names"] == "x"


@pytest.mark.usefixtures("alone")
def test_one_rank_needs_no_padding() -> None:
    batch = (torch.ones(2, 3), 4)
    assert spmd.pad_to_longest(batch)[0] is batch[0]
    with pytest.raises(ValueError, match="no_such"):
        spmd.pad_to_longest(batch, values={"no_such": 1})
    assert spmd.pad_to_longest(batch, multiple=4, value=2)[0].tolist() == [[1, 1, 1, 2]] * 2
    with pytest.raises(ValueError, match="multiple to be 1 or more, got 0"):
        spmd.pad_to_longest(batch, multiple=0)
    assert 0 <= spmd.shared_rng().random() < 1
