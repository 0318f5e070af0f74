"""A long run keeps nothing: memory and open files stay as they are from the first hundreds of calls on."""

from __future__ import annotations

import os

import pytest

import spmd
from spmd.ranks import local_ranks
from tests.harness.cases import MLP
from tests.harness.memory import allocated_bytes
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 17, 4), rows=6, optimizer="AdamW")
SETTLED = 500  # calls after which all that is made once is there


def long_run(rank: int, world: int, style: str, transport: str, calls: int) -> tuple[int, int]:
    """How many bytes of memory and how many open files this rank has more in the end than after ``SETTLED`` calls."""
    with pytest.MonkeyPatch.context() as patched:
        if transport == "messages":
            patched.setattr(local_ranks, "_host", lambda: f"host {rank}")
        objects, before = CASE.build(), (0, 0)
        step = spmd.compile(parallel_mode=spmd.DataParallel(style))(CASE.step)
        for k in range(calls):
            step(*objects, *CASE.part(rank, k))
            if k == SETTLED:
                before = allocated_bytes(), len(os.listdir("/proc/self/fd"))
        return allocated_bytes() - before[0], len(os.listdir("/proc/self/fd")) - before[1]


@pytest.mark.timeout(1800)  # with --exhaustive
@pytest.mark.parametrize("style, transport", [
    pytest.param("replicate", "shared memory", marks=pytest.mark.exhaustive),
    ("fully_shard", "messages"),
])  # fmt: skip
def test_memory_and_open_files_stay_flat(
    ranks: Ranks, request: pytest.FixtureRequest, style: str, transport: str
) -> None:
    calls = 10_000 if request.config.getoption("--exhaustive") else 1_000
    found = ranks.run(2, long_run, style, transport, calls, timeout=900)
    print(f"{calls} calls, {transport}: bytes and files more than after {SETTLED}: {found}")
    for more_bytes, more_files in found:
        assert more_files == 0
        assert more_bytes < 32 * (calls - SETTLED)  # less than the smallest object, were one kept at each call
