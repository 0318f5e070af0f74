"""``spmd.save``: write state to a folder, in parts, such that it is there as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .._torch import local_tensor
from ..call.rng import rng_state
from ..deferral.pending import finish_pending
from ..interpreter.interrupts import deferred_signals
from ..state.background_reads import READS, Read
from . import background
from .background import Handle
from .folders import DATA, MARKER, VALUES, keep_newest, make, path_of, remove_leftovers, target, write_whole
from .marker import Marker, describe
from .per_rank import gather
from .prepare import Prepared, compare, line_of, prepare
from .storage import File, plan_files, write
from .together import Together as Together
from .together import together
from .values import to_bytes


def save(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
    per_rank: Mapping[str, Any] | None = None,
    **state: Any,
) -> Handle:
    """Save models, optimizers and whatever else has state to a folder that all ranks see; all ranks call it.

    ``state``: by name, models, optimizers, schedulers, scalers, anything with ``state_dict`` and ``load_state_dict``,
    and plain values (tensors, numbers, strings, and dicts, lists, tuples and sets of these). State of an optimizer is
    stored by the names of the parameters in the models that are saved with it. The random state of compiled steps
    (``spmd.rng_state``) is saved, too. Each rank writes its parts, and ``spmd.load`` reads them into any other layout.

    - ``step``: write ``folder/step-<step>``; without it, ``folder`` itself is the checkpoint, in place of an older one.
    - ``keep``: afterwards remove all but the ``keep`` newest steps.
    - ``wait``: False returns at once, and a thread writes while training goes on. Parameters and optimizer state of
      compiled steps, on the CPU, are not copied: the first write to them waits until they have been read. All else is
      copied before the call returns.
    - ``per_rank``: what each rank has for itself, by name, such as its data loader: objects with ``state_dict`` and
      ``load_state_dict``, dicts or lists, small ones. As many ranks load it again (``spmd.load(per_rank=)``).

    Returns a handle with ``done()``, ``wait()`` and ``error``. A save that fails in the background is logged, and its
    error raised by ``wait()``, or else by the next save, which waits for the one before it in any case.

    A checkpoint is complete, or it is not there: until the end, ``spmd.load`` takes the one before. If a rank cannot
    write, all ranks raise the same ``SpmdError``. Raises ``TypeError`` or ``ValueError`` for what cannot be saved, also
    where a plain value, or a tensor that is not split, differs between ranks.
    """
    path = path_of(folder)
    _check_arguments(step, keep, wait)
    checkpoint = target(path, step)
    handle = Handle(checkpoint)
    with on_all_ranks(f"saving {checkpoint}") as ranks:
        ranks.run(_end_the_one_before)
        own = gather(per_rank, ranks)
        save = _prepare(checkpoint, step, keep, {**state, **own}, ranks, wait)
        try:
            save.write(ranks) if wait else save.start(handle, ranks, state)
        except BaseException:
            if not save.is_handed_over:
                save.abandon(ranks)
            raise
    if wait:
        handle.end()
    return handle


@contextmanager
def on_all_ranks(what: str) -> Iterator[Together]:
    """Connect all ranks for ``what``, which reads state after the updates that steps have left to later."""
    finish_pending()
    with together(what) as ranks:
        yield ranks


def _end_the_one_before() -> None:
    background.wait_for_last()
    before = background.last(Handle.kind)
    if before is not None:
        before.end_before_the_next()


def _check_arguments(step: Any, keep: Any, wait: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"expected {name} to be an int or None, got {value!r}")
        if value is not None and value < least:
            raise ValueError(f"expected {name} to be at least {least}, got {value}")
    if keep is not None and step is None:
        raise ValueError("keep counts the checkpoints of steps in the folder: give the step, too")
    if not isinstance(wait, bool):
        raise TypeError(f"expected wait to be True or False, got {wait!r}")


def _prepare(
    checkpoint: Path, step: int | None, keep: int | None, state: Mapping[str, Any], ranks: Together, wait: bool
) -> _Save:
    prepared = prepare(state, ranks, compares_trained=wait)
    token = ranks.first(lambda: secrets.token_hex(8))
    return _Save(checkpoint / f"{DATA}{token}", step, keep, prepared)


@dataclass
class _Save:
    """One save: to a data ``folder`` of its own."""

    folder: Path
    step: int | None
    keep: int | None
    prepared: Prepared
    values: bytes = b""
    tensors: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # dtype and shape of all, by name
    is_complete: bool = False  # or about to be
    is_handed_over: bool = False  # to a thread, which makes it complete or abandons it

    def write(self, ranks: Together) -> None:
        """Write everything, on all ranks; the first makes it complete."""
        self._begin(ranks)
        files = write(self.folder, self.prepared.tensors, ranks)
        self._finish(files, ranks)

    def start(self, handle: Handle, ranks: Together, state: Mapping[str, Any]) -> None:
        """Let a thread of each rank do so, which reads live state."""
        group = background.group_for(self.folder.name, ranks)
        self._begin(ranks)
        files = plan_files(self.folder, self.prepared.tensors, ranks)
        work = _Background(self, [])
        reads: list[Read] = []
        ranks.run(lambda: reads.extend(work.reads(files, ranks.size)))
        self.prepared = Prepared({}, self.prepared.ties, {})  # the thread lets go of what it has read
        files.clear()
        with deferred_signals():  # or nobody would end what was started
            READS.start(reads, background.hooks_on(state.values()))
            background.start(handle, ranks, group, work.finish)
            self.is_handed_over = True

    def _begin(self, ranks: Together) -> None:
        self.values = to_bytes(self.prepared.trees, dict(rng_state()), self.folder.name)
        self.tensors = describe(self.prepared.tensors)
        ranks.first(lambda: make(self.folder))

    def _finish(self, files: dict[str, int], ranks: Together) -> None:
        keep, step, checkpoint = self.keep, self.step, self.folder.parent
        ranks.first(lambda: self._complete(files))
        if keep is not None and step is not None:
            ranks.first(lambda: keep_newest(checkpoint.parent, keep, step))

    def _complete(self, files: dict[str, int]) -> None:
        write_whole(self.folder / VALUES, self.values)
        lengths = {**files, VALUES: len(self.values)}
        marker = Marker(self.step, self.folder.name, self.tensors, self.prepared.ties, lengths)
        marker.check_files(self.folder)  # those of other hosts, too
        self.is_complete = True
        write_whole(self.folder.parent / MARKER, marker.to_bytes())
        remove_leftovers(self.folder.parent, self.folder.name)

    def abandon(self, ranks: Together) -> None:
        """Remove what was written, unless it may be complete: another rank can be lost right after the marker is there.

        What is left over then goes with the next save.
        """
        if not self.is_complete and ranks.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class _Background:
    """The work of a rank's thread. ``lines``: what must be equal on all ranks, and is found out by reading it."""

    save: _Save
    lines: list[str]
    lengths: dict[str, int] = field(default_factory=dict)

    def reads(self, files: list[File], ranks: int) -> Iterator[Read]:
        """The reads of a save, in order: files, then tensors that ranks compare. Copies tensors that may change.

        Each file is read at once, and so is each tensor that is compared.
        """
        live = self.save.prepared.live
        for file in files:
            tensors = file.tensors()
            held = {name: tensor if name in live else _copy(tensor) for name, tensor in tensors.items()}
            yield Read({name: held[name] for name in held if name in live}, partial(self._write, file, held))
        for name in self.save.prepared.trained if ranks > 1 else ():
            tensor = self.save.prepared.tensors[name]
            if isinstance(tensor, DTensor):
                continue
            if name in live:
                yield Read({name: local_tensor(tensor)}, partial(self._compare, name, tensor))
            else:
                self._compare(name, tensor)

    def finish(self, ranks: Together) -> None:
        """Read, write, compare, and make it complete, on all ranks."""
        try:
            written = ranks.run(self._read)
            compare(sorted(self.lines), ranks)
            self.save._finish({name: length for each in written for name, length in each.items()}, ranks)
        except BaseException:
            self.save.abandon(ranks)
            raise

    def _read(self) -> dict[str, int]:
        READS.run()
        return self.lengths

    def _write(self, file: File, tensors: dict[str, torch.Tensor]) -> None:
        name, length = file.write(tensors)
        self.lengths[name] = length

    def _compare(self, name: str, tensor: torch.Tensor) -> None:
        self.lines.append(line_of(name, tensor))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; from another device in the stream of the caller, which threads do not share."""
    return tensor.cpu() if tensor.device.type != "cpu" else tensor.clone()
