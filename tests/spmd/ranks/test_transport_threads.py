"""The thread that moves a group's data leaves the core to compute; what runs its collectives does not."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch.distributed as dist

from passes.runtime.transport_threads import behind_compute, threads
from spmd._torch import unregistered_gloo_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")


def policies(of: set[int]) -> list[int]:
    return sorted(map(os.sched_getscheduler, of))


def test_a_group_has_one_thread_that_stays_behind_compute() -> None:
    before = threads()
    earlier = policies(before)  # those of other groups that are open, too
    group = unregistered_gloo_group("alone", 0, 1, dist.HashStore(), 10.0)
    assert policies(threads() - before) == [os.SCHED_OTHER, os.SCHED_BATCH]
    assert policies(before) == earlier
    del group


def test_only_threads_that_start_in_the_body_do() -> None:
    ends = threading.Event()
    outside, inside = (threading.Thread(target=ends.wait, daemon=True) for _ in range(2))
    outside.start()
    with behind_compute():
        inside.start()
    assert [os.sched_getscheduler(each.native_id or 0) for each in (outside, inside)] == [0, os.SCHED_BATCH]
    ends.set()
