"""A group that is closed while a collective is pending keeps no connections."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist

from passes.runtime.gloo import GlooWork, close_group, register
from passes.runtime.peer_connection import PeerLostError
from spmd._torch import new_gloo_group
from tests.harness.pool import Ranks


def closed_while_pending(rank: int, world: int) -> int:
    """Open files after eight groups beyond those after one. Rank 1 never comes to the collective of rank 0."""
    counts = []
    for k in range(9):
        group = new_gloo_group(f"closed/{k}", rank, list(range(world)), 60.0)
        out = torch.zeros(1)
        if rank == 0:
            register(out, dist.all_reduce(out, group=group, async_op=True), group)
        close_group(group)
        dist.destroy_process_group(group)
        del group, out
        dist.barrier()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[-1] - counts[0]


def test_a_closed_group_keeps_no_connections(ranks: Ranks) -> None:
    assert max(ranks.run(2, closed_while_pending)) <= 0


def test_a_work_of_a_closed_group_raises() -> None:
    work = GlooWork(None)
    with pytest.raises(PeerLostError, match="has been closed"):
        work.wait()
