"""The thread that moves a group's data leaves the core to compute; what runs its collectives does not."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

import pytest
import torch.distributed as dist

from passes.runtime.transport_threads import behind_compute, threads
from spmd._torch import unregistered_gloo_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")


def policies() -> dict[int, int]:
    """The policy of each thread; one that ends meanwhile has none."""
    found = {}
    for each in threads():
        with suppress(ProcessLookupError):
            found[each] = os.sched_getscheduler(each)
    return found


def test_a_group_has_one_thread_that_stays_behind_compute() -> None:
    before = policies()  # those of other groups that are open, too
    group = unregistered_gloo_group("alone", 0, 1, dist.HashStore(), 10.0)
    now = policies()
    assert sorted(policy for each, policy in now.items() if each not in before) == [os.SCHED_OTHER, os.SCHED_BATCH]
    assert all(now[each] == policy for each, policy in before.items() if each in now)
    del group


def test_only_threads_that_start_in_the_body_do() -> None:
    ends = threading.Event()
    outside, inside = (threading.Thread(target=ends.wait, daemon=True) for _ in range(2))
    outside.start()
    with behind_compute():
        inside.start()
    assert [os.sched_getscheduler(each.native_id or 0) for each in (outside, inside)] == [0, os.SCHED_BATCH]
    ends.set()
