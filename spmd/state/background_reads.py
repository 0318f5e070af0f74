"""Background reads: a thread reads state in place while training goes on; writers block until theirs is read.

A save or a publication in the background (``spmd/checkpoints/background.py``) holds no copy of state. Forward and
backward run while it reads. Before a program writes to a tensor, it asks here whether that was read (``codegen.py``:
one look at a flag while nothing is read). So do all others that change state or move it: a compile, flat storages,
eager optimizers, ``load_state_dict``, ``unshard``, ``recover``. What else writes to a tensor that is still to be
read is found out by its version counter, and the save fails.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from passes import SpmdError

from .._torch import version_of

Span = tuple[int, int]  # the first address of a tensor, and the one behind its last


@dataclass(eq=False)
class Read:
    """``tensors``, by name, that ``work`` reads at once."""

    tensors: dict[str, torch.Tensor]
    work: Callable[[], None]
    is_over: threading.Event = field(default_factory=threading.Event)
    is_awaited: bool = False  # by a writer that may write to the tensors afterwards
    changed_before: list[str] = field(default_factory=list)  # what had been written to when it was awaited

    def __post_init__(self) -> None:
        self.versions = list(map(version_of, self.tensors.values()))
        self.spans = [span_of(tensor) for tensor in self.tensors.values() if tensor.numel()]

    def overlaps(self, spans: Sequence[Span]) -> bool:
        """Whether it reads any of this memory."""
        return any(start < end_b and begin_b < end for start, end in self.spans for begin_b, end_b in spans)

    def wait(self) -> None:
        """Wait for it; the caller may write to the tensors afterwards."""
        self.is_over.wait()
        self.changed_before = self._written_to()
        self.is_awaited = True

    def changed(self) -> list[str]:
        """The tensors that somebody wrote to without waiting."""
        written = self._written_to()
        return self.changed_before if self.is_awaited else written  # asked last: a waiting writer may be writing by now

    def _written_to(self) -> list[str]:
        pairs = zip(self.tensors.items(), self.versions, strict=True)
        return [name for (name, tensor), version in pairs if version_of(tensor) != version]


class BackgroundReads:
    """The reads that are under way in this process: those of one save or publication at most.

    The thread leaves its hooks to those who wait, or would have waited: torch may be going through the hooks meanwhile.
    """

    def __init__(self) -> None:
        self.is_active = False  # whether there may be somebody to wait for, or hooks to remove
        self._reads: list[Read] = []
        self._hooks: list[Any] = []
        self._is_idle = threading.Event()
        self._is_idle.set()

    def start(self, reads: Iterable[Read], hooks: Iterable[Any]) -> None:
        """Start the reads; writers block until theirs is read. The first writer after the end removes ``hooks``."""
        self.release()
        assert not self.is_active, "the save before has ended"
        self._reads, self._hooks = list(reads), list(hooks)
        self._is_idle.clear()
        self.is_active = True

    def run(self) -> None:
        """Read everything; called by the thread. Raises what a read raises; nobody waits after that.

        Raises ``SpmdError`` with the names of tensors that were written to meanwhile. No reference to state is left.
        """
        try:
            changed = self._read()
        finally:
            self.end()
        if changed:
            raise SpmdError(
                f"{', '.join(sorted(set(changed))[:8])} changed while it was saved or published: wait for that before "
                "anything but a compiled step, optimizer.step() or load_state_dict() writes to parameters or optimizer "
                "state, or pass wait=True"
            )

    def _read(self) -> list[str]:
        """Read everything; returns the names of what was written to meanwhile."""
        for read in self._reads:
            read.work()
            read.is_over.set()
        return [name for read in self._reads for name in read.changed()]

    def end(self) -> None:
        """Let everybody write."""
        for read in self._reads:
            read.is_over.set()
        self._reads = []
        self._is_idle.set()

    def release(self) -> None:
        """Remove the hooks if all has been read. Not to be called by a hook, nor by the thread that reads."""
        if self.is_active and self._is_idle.is_set():
            for hook in self._hooks:
                hook.remove()
            self._hooks, self.is_active = [], False

    def wait(self, *tensors: torch.Tensor) -> None:
        """Wait until these have been read, as far as they are to be."""
        spans = [span_of(tensor) for tensor in tensors if tensor.numel()]
        for read in self._reads:
            if not read.is_awaited and read.overlaps(spans):
                read.wait()
        self.release()

    def wait_for_all(self) -> None:
        """Wait until all has been read and let go."""
        self.wait_within_hooks()
        self.release()

    def wait_within_hooks(self) -> None:
        """Wait for all reads, in a hook: it leaves the hooks as they are."""
        if self.is_active:
            self._is_idle.wait()

    def forget(self) -> None:
        """A forked child has no thread to wait for."""
        self._reads, self._is_idle = [], threading.Event()
        self._is_idle.set()


def span_of(tensor: torch.Tensor) -> Span:
    """The addresses between which a tensor that is not empty lies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


READS = BackgroundReads()


def wait_within_hooks(*_: Any) -> None:
    """Wait for ``READS`` in a hook, with its arguments: a function that copies of a model may hold, too."""
    READS.wait_within_hooks()


os.register_at_fork(after_in_child=READS.forget)
