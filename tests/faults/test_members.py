"""Messages about another rank name the axes along which this one meets it."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from spmd.ranks.failures import Failure, FailureBoard, StateIs
from spmd.ranks.members import Members

MEMBERS = Members((0, 1, 2, 3, 4, 5), (("dp", 2), ("tp", 3)))


@pytest.fixture(autouse=True)
def rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)


@pytest.mark.parametrize("others, axes", [
    ([1], ""),
    ([2], "tp"),
    ([4], "dp"),
    ([3], "dp and tp"),
    ([0, 2], "tp"),
    ([1, 4, 2], "dp and tp"),
])  # fmt: skip
def test_axes_to(others: list[int], axes: str) -> None:
    assert MEMBERS.axes_to(others) == axes


@pytest.mark.parametrize("found, sentence", [
    (
        [Failure(1, "PeerLostError", StateIs.BEFORE.value, lost=True)],
        "step did not end on all ranks: along dp, rank 4 has ended, or does not answer. State is on rank 1 as before "
        "the call, on rank 4 unknown. Look at the output of rank 4",
    ),
    (
        [Failure(4, "KeyError: 'x'", StateIs.MIXED.value, lost=False), Failure(1, "", StateIs.AFTER.value, lost=True)],
        "step did not end on all ranks: along dp, rank 4 raised KeyError: 'x'. State is on rank 1 as after the call, "
        "on rank 4 partly updated. Look at the output of rank 4",
    ),
    (
        [Failure(rank, "", StateIs.BEFORE.value, lost=True) for rank in (1, 4)],
        "step did not end on all ranks: the connection along dp was lost. State is on rank 1 as before the call, on "
        "rank 4 as before the call",
    ),
])  # fmt: skip
def test_the_sentence_names_axis_rank_state_and_where_to_look(found: list[Failure], sentence: str) -> None:
    board = FailureBoard(dist.HashStore(), "name", Members((1, 4), (("dp", 2),)))
    assert board.explain("step", found) == sentence
