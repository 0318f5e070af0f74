"""Saves and publications in the background: a thread reads live state while the next step computes.

Ranks finish together, and one of them runs at a time. The threads of all ranks communicate in a gloo group of their
own, which no step uses and nobody else closes: that a rank has ended shows there at once. Threads alone finish it, also
when the program ends.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from passes import RankFailedError, SpmdError
from passes.runtime.gloo import is_done
from passes.runtime.peer_connection import PeerLostError

from .._torch import set_timeout, unregistered_gloo_group
from ..ranks.connection import CONNECTING
from ..state.background_reads import READS, wait_within_hooks
from .together import Together

_log = logging.getLogger("spmd")


class Handle:
    """A save, which may still be running. ``folder``: the checkpoint that it writes."""

    kind = "save"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._error: Exception | None = None
        self._is_over = threading.Event()
        self._is_raised = False  # whether somebody has seen the error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "complete" if self._error is None else "failed"
        return f"<{self.kind} of {self.folder}: {state}>"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._is_over.is_set()

    @property
    def error(self) -> Exception | None:
        """Why it failed; None if it is complete, or still running."""
        return self._error

    def wait(self) -> None:
        """Wait until the checkpoint is complete. Raises the error, with the name of the folder, if it failed."""
        self._is_over.wait()
        READS.release()
        self._is_raised = True
        if self._error is not None:
            raise self._error

    def until_over(self) -> None:
        """Wait until it has ended, well or not."""
        self._is_over.wait()

    def end(self, error: Exception | None = None) -> None:
        """Note how it ended."""
        self._error = error
        self._is_over.set()

    def end_before_the_next(self) -> None:
        """Wait for it, and raise its error unless somebody has seen that."""
        self._is_over.wait()
        if self._error is not None and not self._is_raised:
            self._is_raised = True
            raise SpmdError(f"the {self.kind} before this one failed: {self._error}")


class Group:
    """A gloo group of all ranks of the world, for threads; it outlives the groups that a user destroys."""

    def __init__(self, name: str, ranks: Together) -> None:
        self._size, self._seconds, self._world = ranks.size, ranks.timeout, weakref.ref(dist.group.WORLD)
        name = f"spmd/save/{name}"
        with ranks.watched_store(name) as store:
            self._group = unregistered_gloo_group(name, ranks.rank, ranks.size, store, CONNECTING)
        set_timeout(self._group, ranks.timeout)
        self.is_open = True

    def is_usable(self) -> bool:
        """Whether the ranks of the world that there is now can communicate in it."""
        return self.is_open and dist.is_initialized() and dist.group.WORLD is self._world()

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's ``text``. Raises ``PeerLostError`` if a rank has ended, or does not come in time."""
        content = text.encode()
        lengths = [int(each) for each in self._all_gather(torch.tensor([len(content)]))]
        mine = torch.frombuffer(bytearray(content.ljust(max(lengths))), dtype=torch.uint8)
        rows = self._all_gather(mine)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        if not is_done(self._group.allgather([rows], [mine]), self._seconds):
            raise PeerLostError(f"a rank did not come within {self._seconds:g} s")
        return rows

    def close(self) -> None:
        """Let the other ranks raise where they wait for this one."""
        self.is_open = False
        del self._group


_last: dict[str, Handle] = {}  # of each kind the one that was started last
_group: Group | None = None


def last(kind: str) -> Handle | None:
    """The save, or the publication, that was started last in the background."""
    return _last.get(kind)


def wait_for_last() -> None:
    """Wait for what runs in the background, whether it fails or not."""
    for handle in _last.values():
        handle.until_over()
    READS.release()


def group_for(name: str, ranks: Together) -> Group | None:
    """The group for the threads of these ranks, which all of them ask for; ``name``: of a new one, the same on all."""
    global _group
    if ranks.size == 1:
        return None
    if not all(ranks.run(lambda: _group is not None and _group.is_usable())):
        _group = Group(name, ranks)  # not in ``run``: where one rank fails, the others wait within
    return _group


def start(handle: Handle, ranks: Together, group: Group | None, finish: Callable[[Together], None]) -> None:
    """Let a thread finish reads that have been started. ``finish`` gets the ranks as the thread sees them."""
    aside = ranks.aside(group.all_gather_text) if group is not None else Together(ranks.what, None)
    thread = threading.Thread(target=_run, args=(handle, aside, group, finish), name=f"spmd: {ranks.what}")
    try:
        thread.start()  # no daemon: the program ends when the save has
    except BaseException:
        READS.end()
        if group is not None:
            group.close()
        raise
    _last[handle.kind] = handle


def hooks_on(state: Iterable[Any]) -> Iterator[Any]:
    """Hooks by which eager optimizers, and models that load state, wait for what is read."""
    yield register_optimizer_step_pre_hook(wait_within_hooks)  # an optimizer's own hooks are guarded
    for each in state:
        if isinstance(each, nn.Module):
            yield each.register_load_state_dict_pre_hook(wait_within_hooks)


def _run(handle: Handle, ranks: Together, group: Group | None, finish: Callable[[Together], None]) -> None:
    error: Exception | None = None
    is_agreed = False
    try:
        finish(ranks)
    except PeerLostError as lost:
        error = RankFailedError(f"{ranks.what} did not end: another rank has ended, or does not answer ({lost})")
    except Exception as raised:
        kind = type(raised) if type(raised) in (SpmdError, ValueError) else SpmdError
        message = str(raised) or type(raised).__name__
        error = kind(message if message.startswith(ranks.what) else f"{ranks.what} failed: {message}")
        is_agreed = raised is ranks.agreed  # another error is kept than that whose frames hold state
    finally:
        READS.end()
    if error is not None:
        _log.error("%s", error)
        if group is not None and not is_agreed:
            group.close()
    handle.end(error)


def _forget() -> None:
    """A forked child has no thread that would end a save, and the group is its parent's."""
    global _group
    _last.clear()
    _group = None


os.register_at_fork(after_in_child=_forget)
