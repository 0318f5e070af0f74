"""One thread runs the collectives of a gloo group of ours: two of torch's corrupt memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmd._torch import new_gloo_group, unregistered_gloo_group
from tests.harness.pool import Ranks


def new_threads(open_group: Callable[[], Any]) -> tuple[Any, int]:
    """The group that ``open_group`` opens, and how many threads it starts."""
    before = len(list(Path("/proc/self/task").iterdir()))
    group = open_group()
    return group, len(list(Path("/proc/self/task").iterdir())) - before


def threads_of_groups(rank: int, world: int, interface: str) -> tuple[int, int, int, float]:
    """Threads of a group of torch and of both kinds of ours, and the sum of a collective in ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", interface)
        theirs, two = new_threads(lambda: dist.new_group([0]))
        ours, one = new_threads(lambda: new_gloo_group("workers", 0, [0], dist.HashStore(), 30.0))
        kept, lone = new_threads(lambda: unregistered_gloo_group("workers", 0, 1, dist.HashStore(), 30.0))
    x = torch.ones(3)
    dist.all_reduce(x, group=ours)
    kept.allreduce([x]).wait()
    for group in (theirs, ours):
        dist.destroy_process_group(group)
    return two, one, lone, x.sum().item()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("interface", ["", "lo"])
def test_a_group_of_ours_has_one_thread_less_than_one_of_torch(ranks: Ranks, interface: str) -> None:
    [(two, one, lone, total)] = ranks.run(1, threads_of_groups, interface)
    assert (one, lone, total) == (two - 1, two - 1, 3.0)
