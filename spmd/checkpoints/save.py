"""``spmd.save``: write state to a folder, in parts, such that it is there as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..call.rng import rng_state
from .folders import DATA, MARKER, VALUES, keep_newest, path_of, remove_leftovers, target, write_whole
from .marker import Marker, describe
from .prepare import Prepared, prepare
from .storage import write
from .together import Together, together
from .values import to_bytes


def save(
    folder: str | os.PathLike[str], *, step: int | None = None, keep: int | None = None, wait: bool = True, **state: Any
) -> None:
    """Save models, optimizers and whatever else has state to a folder that all ranks see; all ranks call it.

    ``state``: by name, models, optimizers, schedulers, scalers, anything with ``state_dict`` and ``load_state_dict``,
    and plain values (tensors, numbers, strings, and dicts, lists, tuples and sets of these). State of an optimizer is
    stored by the names of the parameters in the models that are saved with it. The random state of compiled steps
    (``spmd.rng_state``) is saved, too. Each rank writes its parts, and ``spmd.load`` reads them into any other layout.

    - ``step``: write ``folder/step-<step>``; without it, ``folder`` itself is the checkpoint, in place of an older one.
    - ``keep``: afterwards remove all but so many of the newest steps.
    - ``wait``: must be True: the call returns when the checkpoint is complete.

    A checkpoint is complete, or it is not there: until the end, ``spmd.load`` takes the one before. If a rank cannot
    write, all ranks raise the same error. Raises ``TypeError`` or ``ValueError`` for what cannot be saved, also where
    a plain value, or a tensor that is not split, differs between ranks.
    """
    path = path_of(folder)
    _check_arguments(step, keep, wait)
    checkpoint = target(path, step)
    with together(f"saving {checkpoint}") as ranks:
        _save(checkpoint, step, state, ranks)
        if keep is not None and step is not None:
            ranks.first(lambda: keep_newest(path, keep, step))


def _check_arguments(step: Any, keep: Any, wait: Any) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"expected {name} to be an int or None, got {value!r}")
        if value is not None and value < least:
            raise ValueError(f"expected {name} to be at least {least}, got {value}")
    if keep is not None and step is None:
        raise ValueError("keep counts the checkpoints of steps in the folder: give the step, too")
    if wait is not True:
        raise ValueError(f"expected wait=True, got {wait!r}: saving in the background is not implemented")


def _save(checkpoint: Path, step: int | None, state: Mapping[str, Any], ranks: Together) -> None:
    prepared = prepare(state, ranks)
    token = ranks.first(lambda: secrets.token_hex(8))
    save = _Save(checkpoint / f"{DATA}{token}", step, prepared)
    try:
        save.write(ranks)
    except BaseException:
        if ranks.rank == 0:
            save.abandon()
        raise


@dataclass
class _Save:
    """One save: to a data ``folder`` of its own."""

    folder: Path
    step: int | None
    prepared: Prepared
    is_complete: bool = False  # or about to be

    def write(self, ranks: Together) -> None:
        """Write everything, on all ranks; the first makes it complete."""
        values = to_bytes(self.prepared.trees, dict(rng_state()))
        ranks.first(lambda: self.folder.mkdir(parents=True))
        files = write(self.folder, self.prepared.tensors, ranks)
        ranks.first(lambda: self._complete(values, files))

    def _complete(self, values: bytes, files: dict[str, int]) -> None:
        write_whole(self.folder / VALUES, values)
        tensors, lengths = describe(self.prepared.tensors), {**files, VALUES: len(values)}
        marker = Marker(self.step, self.folder.name, tensors, self.prepared.ties, lengths)
        marker.check_files(self.folder)  # those of other hosts, too
        self.is_complete = True
        write_whole(self.folder.parent / MARKER, marker.to_bytes())
        remove_leftovers(self.folder.parent, self.folder.name)

    def abandon(self) -> None:
        """Remove what was written, unless it may be complete: another rank can be lost right after the marker is there.

        What is left over then goes with the next save.
        """
        if not self.is_complete:
            shutil.rmtree(self.folder, ignore_errors=True)
