"""One thread runs the collectives of a gloo group that spmd opens: two of torch's corrupt memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import spmd
from spmd._torch import gloo_of_one_worker, new_gloo_group, unregistered_gloo_group
from tests.harness.pool import Ranks


def new_threads(open_group: Callable[[], Any]) -> tuple[Any, int]:
    """The group that ``open_group`` opens, and how many threads it starts."""
    before = len(list(Path("/proc/self/task").iterdir()))
    group = open_group()
    return group, len(list(Path("/proc/self/task").iterdir())) - before


def threads_of_groups(rank: int, world: int, interface: str) -> tuple[int, int, float]:
    """Threads of both kinds of groups of ours, and the sum of a collective in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", interface)
        ours, one = new_threads(lambda: new_gloo_group("workers", 0, [0], dist.HashStore(), 30.0))
        kept, lone = new_threads(lambda: unregistered_gloo_group("workers", 0, 1, dist.HashStore(), 30.0))
    x = torch.ones(3)
    dist.all_reduce(x, group=ours)
    kept.allreduce([x]).wait()
    dist.destroy_process_group(ours)
    return one, lone, x.sum().item()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("interface", ["", "lo"])
def test_a_group_of_ours_has_a_thread_for_collectives_and_one_for_data(ranks: Ranks, interface: str) -> None:
    assert ranks.run(1, threads_of_groups, interface) == [(2, 2, 3.0)]


@pytest.mark.usefixtures("alone")
def test_so_has_the_process_group_that_spmd_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    spmd.world("cpu")
    assert dist.group.WORLD is not None
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._threads == 1
    assert dist.ProcessGroupGloo is distributed_c10d.ProcessGroupGloo  # torch's own again


def test_groups_that_open_at_once_leave_torchs_own_class() -> None:
    """The first body ends while the second one runs, and that one still opens groups of one worker."""
    first, second = gloo_of_one_worker(), gloo_of_one_worker()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert distributed_c10d.ProcessGroupGloo is not dist.ProcessGroupGloo
    second.__exit__(None, None, None)
    assert distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo
