"""A rank that is late is waited for and named; timeouts and numbers of calls of any size are handled."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spmd
from spmd.ranks import consensus, patience
from tests.harness.cases import MLP
from tests.harness.meeting import wait_for
from tests.harness.oracle import all_unequal, compiled_run, plain_run, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 17, 4), rows=6, optimizer="SGD")


def late(rank: int, world: int, first: bool, logged: Path) -> list[str]:
    """Rank 1 comes late to the first call, or to one that has to be compiled anew. What ranks log in that call."""
    lines, k, late_call = list[str](), 0, 0 if first else 2
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        if k == late_call and "has waited" in record.getMessage():
            lines.append(record.getMessage())
            logged.touch()

    handler.emit = emit  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patience, "_SLICE", 0.1)
        patched.setattr(patience, "_FIRST", 0.5)
        patched.setattr(patience, "_AGAIN", 1.0)
        logging.getLogger("spmd").addHandler(handler)
        try:
            objects, step = CASE.build(), spmd.compile(CASE.step)
            for k in range(3):
                if rank == 1 and k == late_call:
                    wait_for(logged)
                if k == 2:
                    step = spmd.compile(CASE.step)
                result = step(*objects, *CASE.part(rank, k))
        finally:
            logging.getLogger("spmd").removeHandler(handler)
    assert all_unequal(plain_run(CASE, world, 3)[-1:], [snapshot(result, objects)], rank, world) == []
    return lines


@pytest.mark.parametrize("first", [True, False])
def test_a_late_rank_is_waited_for_and_named(ranks: Ranks, first: bool, tmp_path: Path) -> None:
    one, other = ranks.run(2, late, first, tmp_path / "logged")
    assert any("rank 0 has waited" in line and "for rank 1 (along dp) to come to step" in line for line in one)
    assert not any("for rank 0" in line and "come to step;" in line for line in other)


def too_late(rank: int, world: int, given_up: Path) -> tuple[str, str]:
    """Rank 1 comes after rank 0 has given up; the two messages, of which the second is of a call that goes well."""
    objects, step = CASE.build(), spmd.compile(timeout=1.0)(CASE.step)
    if rank == 1:
        wait_for(given_up)
    with pytest.raises(spmd.RankMismatchError) as caught:
        step(*objects, *CASE.part(rank, 0))
    given_up.touch()
    numbers = torch.full((1,), rank)
    dist.all_reduce(numbers)  # nothing is left in the user's group
    assert numbers.item() == 1
    step = spmd.compile(CASE.step)
    return str(caught.value), str(float(step(*objects, *CASE.part(rank, 1))))


def test_a_rank_that_comes_too_late_hears_the_same(ranks: Ranks, tmp_path: Path) -> None:
    (one, first), (other, second) = ranks.run(2, too_late, tmp_path / "given up")
    assert "waited 1 s for rank 1 (along dp) to come to step" in one
    assert "rank 0 raised LateError: waited 1 s for rank 1 (along dp) to come to step" in other
    assert first == second


def extreme(rank: int, world: int, timeout: float, calls: int) -> list[str]:
    consensus._calls = calls
    try:
        _, got = compiled_run(rank, CASE, 3, timeout=timeout)
    finally:
        consensus._calls = 0
    return all_unequal(plain_run(CASE, world, 3), got, rank, world)


@pytest.mark.parametrize("timeout, calls", [(math.inf, 0), (1e9, 2**31 - 2), (3e6, 2**40)])
def test_long_timeouts_and_many_calls(ranks: Ranks, timeout: float, calls: int) -> None:
    assert ranks.run(2, extreme, timeout, calls) == [[], []]


def interrupted_before(rank: int, world: int, calls: int) -> str:
    """Rank 1 is interrupted after some calls, while it binds the arguments, before it has met the others."""
    objects, step = CASE.build(), spmd.compile(CASE.step)
    for k in range(calls):
        step(*objects, *CASE.part(rank, k))
    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patched, pytest.raises(BaseException) as caught:
        if rank == 1:
            patched.setattr(step._dispatch, "fit", interrupt)
        step(*objects, *CASE.part(rank, calls))
    assert time.monotonic() - start < 30
    result = step(*objects, *CASE.part(rank, calls))
    assert all_unequal(plain_run(CASE, world, calls + 1)[-1:], [snapshot(result, objects)], rank, world) == []
    return f"{type(caught.value).__name__}: {caught.value}"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("calls", [0, 2])
def test_an_interrupt_before_ranks_agree_is_known_to_all(ranks: Ranks, calls: int) -> None:
    one, other = ranks.run(2, interrupted_before, calls)
    assert other == "KeyboardInterrupt: "
    assert "rank 1 raised KeyboardInterrupt" in one
