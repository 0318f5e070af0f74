"""Collectives of gloo in a program: waits that say when a peer is lost, and a group that lets go of all its peers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from .._torch import register_work
from .peer_connection import PeerLostError

_SLICE = 1.0  # seconds that an interrupt of this rank may have to wait
_MESSAGE = 86_400.0  # seconds for a message: a stage may compute longer than ranks take to connect; a lost peer is seen
_TAG = 20_262  # of a message that nobody sends


class GlooWork(dist.Work):
    """A pending collective of gloo. ``wait`` raises ``PeerLostError`` if a peer has ended or closed its group."""

    def __init__(self, work: Any, in_slices: bool = True) -> None:
        super().__init__()
        self._work, self._in_slices = work, in_slices

    def wait(self, timeout: Any = None) -> bool:
        """Wait until it is done."""
        if not self._in_slices:
            _wait_for_message(self._work)
            return True
        while not is_done(self._work, _SLICE):
            pass
        _finish(self._work, _SLICE)
        return True


class _MessageThread(threading.Thread):
    """Waits for messages, one at a time, while the thread that gives them answers signals."""

    def __init__(self) -> None:
        super().__init__(name="spmd messages", daemon=True)
        self._given, self._done = SimpleQueue[list[Any]](), SimpleQueue[Exception | None]()
        self.start()

    def run(self) -> None:
        while given := self._given.get():
            self._done.put(_failure(given.pop()))

    def wait(self, work: Any) -> None:
        """Wait for a message. Raises ``PeerLostError``, or what the handler of a signal raises."""
        self._given.put([work])
        error = self._done.get()
        if error is not None:
            raise error

    def end(self) -> None:
        """End, once what it waits for does."""
        self._given.put([])


_idle = list[_MessageThread]()


def _wait_for_message(work: Any) -> None:
    """Wait for a message without slices, which gloo does not have, and answer signals all the same.

    A thread whose wait was interrupted is used no more: its wait, and with that the thread, ends once the group is
    closed.
    """
    if threading.current_thread() is not threading.main_thread():
        _finish(work, _MESSAGE)
        return
    thread = _idle.pop() if _idle else _MessageThread()
    if not thread.is_alive():  # this process was forked from the one that had it
        thread = _MessageThread()
    try:
        thread.wait(work)
    except BaseException:
        thread.end()
        raise
    _idle.append(thread)


def _failure(work: Any) -> Exception | None:
    """Wait for a message and return what that raises, or None."""
    try:
        _finish(work, _MESSAGE)
    except Exception as error:
        return error
    return None


def is_done(work: Any, seconds: float) -> bool:
    """Wait for a collective of gloo, at most ``seconds``; returns whether it is done. Raises ``PeerLostError``.

    Not for point-to-point messages: gloo closes the group when such a wait times out.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        _finish(work, seconds)
    return True


def _finish(work: Any, seconds: float) -> None:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


def register(out: torch.Tensor, work: Any, group: Any, in_slices: bool = True) -> None:
    """Let ``wait_tensor(out)`` wait for ``work``, which a collective of ``group`` returned."""
    register_work(out, GlooWork(work, in_slices) if is_gloo(group) else work)


def start_message(out: torch.Tensor, start: Callable[..., Any], x: torch.Tensor, group: Any, **options: Any) -> None:
    """Let ``wait_tensor(out)`` wait for a message of ``group``, which ``dist.isend`` or ``dist.irecv`` starts.

    Raises ``PeerLostError`` if gloo knows already that the peer is lost.
    """
    try:
        work = start(x, group=group, **options)
    except RuntimeError as error:
        if is_gloo(group):
            raise PeerLostError(str(error)) from error
        raise
    register(out, work, group, in_slices=False)


def is_gloo(group: Any) -> bool:
    """Whether ``group`` moves CPU tensors by gloo only."""
    return dist.get_backend(group) == "gloo"


def close_group(group: Any) -> None:
    """Close the connections of a gloo group: what is pending in it fails at once, on all ranks, and nothing is left.

    gloo closes all connections of a group when the wait for a message times out, so this waits for one that nobody
    sends: from each rank in turn, since one whose connection is lost fails at once, and closes no other. (Its ``abort``
    and ``shutdown`` leave pending collectives as they are. Seen in torch 2.11 to 2.15.)
    """
    for other in set(range(group.size())) - {group.rank()}:
        with suppress(RuntimeError):
            message = dist.irecv(torch.empty(1, dtype=torch.uint8), group_src=other, group=group, tag=_TAG)
            assert message is not None, "this rank is of the group"
            message.wait(timedelta(milliseconds=1))
