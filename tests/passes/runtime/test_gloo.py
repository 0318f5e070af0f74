"""Waits for messages of gloo, which a thread makes so that signals are answered meanwhile; a group that is closed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from passes.runtime.gloo import GlooWork, close_group
from tests.harness.pool import Ranks


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in the main thread after so long."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Message:
    """A message that comes once it is ``there``; the thread that waits for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.there, self.error, self.thread = threading.Event(), error, threading.current_thread()

    def wait(self, timeout: Any) -> bool:
        self.thread = threading.current_thread()
        if self.error is not None:
            raise self.error
        return self.there.wait(10)


def test_a_thread_whose_wait_was_interrupted_ends_with_it() -> None:
    message = Message()
    with pytest.raises(TimeoutError), interrupted(0.2):
        GlooWork(message, in_slices=False).wait()
    message.there.set()
    message.thread.join(5)
    assert not message.thread.is_alive()
    first, second = Message(), Message()
    for each in (first, second):
        each.there.set()
        GlooWork(each, in_slices=False).wait()
    assert first.thread is second.thread is not message.thread


def test_what_a_wait_raises_is_raised_here() -> None:
    with pytest.raises(ValueError, match="of another kind"), interrupted(5):
        GlooWork(Message(ValueError("of another kind")), in_slices=False).wait()


def closes_after_another(rank: int, world: int) -> str:
    """Rank 1 closes a group, and so does rank 0 once it has seen that; the others wait for rank 0. What a rank saw."""
    group = dist.new_group(backend="gloo")
    try:
        if rank != 1:
            dist.recv(torch.empty(1), group_src=0 if rank else 1, group=group)
    except RuntimeError as error:
        seen = str(error)
    else:
        seen = "nothing"
    if rank < 2:
        close_group(group)
    dist.barrier()
    return seen


def test_a_rank_that_has_lost_one_peer_closes_its_connections_to_the_others(ranks: Ranks) -> None:
    first, closing, *waiting = ranks.run(4, closes_after_another, timeout=20)
    assert closing == "nothing"
    assert all("onnection" in seen for seen in (first, *waiting))
