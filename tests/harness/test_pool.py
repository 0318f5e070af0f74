"""The pool: results by rank, tracebacks of failing ranks, stacks of ranks that hang, and workers that are replaced."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .pool import RankError, Ranks
from .worker import _WORN


def summed(rank: int, world: int, value: float) -> tuple[int, float]:
    total = torch.tensor(value * rank)
    dist.all_reduce(total)
    return rank, total.item()


def failing(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the expected message")
    dist.barrier()


def hanging(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(600)


def dying(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(3)


def aborting(rank: int, world: int) -> None:
    if rank == 0:
        print("before the end", file=sys.stderr)
        os.abort()


def untidy(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)


def vanish_once(marker: Path) -> None:
    """End the first process that calls it."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return
    os._exit(4)


@dataclass(frozen=True)
class Vanishing:
    """An argument that ends the first process that unpickles it, before there is a process group."""

    marker: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return vanish_once, (self.marker,)


def given(rank: int, world: int, value: Any) -> None:
    """Do nothing."""


def default_dtype(rank: int, world: int) -> torch.dtype:
    return torch.get_default_dtype()


def process(rank: int, world: int) -> int:
    return os.getpid()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_answers_in_order(ranks: Ranks, world: int) -> None:
    total = 2.0 * sum(range(world))
    assert ranks.run(world, summed, 2.0) == [(rank, total) for rank in range(world)]


def test_processes_are_reused_for_the_next_job(ranks: Ranks) -> None:
    assert ranks.run(2, process) == ranks.run(4, process)[:2]


def groups_in_cycles(rank: int, world: int) -> int:
    """Leave many groups that only the collector can free; the process."""
    for _ in range(_WORN + 1):
        cycle: list[Any] = [dist.new_group(range(world))]
        cycle.append(cycle)
    return os.getpid()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_threads_of_groups_that_nothing_needs_wear_no_process_out(ranks: Ranks) -> None:
    assert ranks.run(2, groups_in_cycles) == ranks.run(2, process)


def test_an_error_has_the_traceback_of_its_rank_which_is_replaced(ranks: Ranks) -> None:
    before = ranks.run(2, process)
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first(.|\n)*in failing(.|\n)*the expected message"):
        ranks.run(2, failing)
    assert not set(ranks.run(2, process)) & set(before)


def test_a_hang_is_reported_with_rank_and_stack(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed first: no answer within 1 s(.|\n)*in hanging"):
        ranks.run(2, hanging, timeout=1, grace=1, process_group=False)  # which may take longer to join
    assert ranks.run(2, summed, 1.0) == [(0, 1.0), (1, 1.0)]


def test_a_process_that_dies_is_reported_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed first: the process died with exit code 3"):
        ranks.run(2, dying)
    assert ranks.run(2, summed, 1.0) == [(0, 1.0), (1, 1.0)]


def test_a_process_that_a_signal_ends_is_reported_with_its_stack(ranks: Ranks) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(2, aborting)
    text = str(error.value)
    assert text.startswith("rank 0 of 2 failed first: the process died with exit code -6\nbefore the end\n")
    assert "in aborting" in text and "SIGABRT" in text  # of Python, and of C++


def test_a_rank_whose_peer_vanished_before_they_connected_is_replaced_too(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="died with exit code 4"):
        ranks.run(2, given, Vanishing(tmp_path / "marker"), timeout=2, grace=5)
    assert ranks.run(2, summed, 1.0) == [(0, 1.0), (1, 1.0)]


def test_a_job_that_leaves_torch_changed_fails_and_affects_no_other(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"untidy left torch changed(.|\n)*default dtype"):
        ranks.run(2, untidy)
    assert ranks.run(2, default_dtype) == [torch.float32, torch.float32]
