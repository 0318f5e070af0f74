"""``spmd.subscribe``: read the weights that a process of this host publishes while it trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from passes import SpmdError

from ..checkpoints.names import Names
from ..checkpoints.trees import is_expanded
from .engine_layout import EngineLayout, Split, Target
from .folders import Newest, folder_of, is_owned, layout_name, read_newest
from .layout import Layout
from .segments import MappedSegment

_POLL = 0.002  # seconds between looks for a version
_SHOWN = 8


def subscribe(
    to: str | os.PathLike[str],
    *,
    names: Names | None = None,
    split: Split | None = None,
    rank: int = 0,
    ranks: int = 1,
    timeout: float = 60.0,
) -> Subscription:
    """Read the weights that ``spmd.publish(model, to=to)`` of a process of this host publishes.

    The reader needs no process group, and the trainer does not wait for it. Waits for the first version, at most
    ``timeout`` seconds, since tables are compared with what is there.

    - ``names``: the table of ``spmd.from_pretrained``, from the names of the model that trains to those wanted here:
      renamed, fused or split, as ``{("*.gate_proj.*", "*.up_proj.*"): "*.gate_up_proj.*"}``.
    - ``split``: tensors of which this ``rank`` of ``ranks`` of an engine has a part, by fnmatch pattern of the names
      here: a dim, or ``(dim, sizes)`` where parts of these sizes are split by themselves, as are those that ``names``
      fuses. The others are whole.

    Raises ``TypeError`` or ``ValueError`` for a table that does not fit what is published, ``SpmdError`` if nothing
    is published in time.
    """
    folder = folder_of(to)
    for what, value, least in (("rank", rank, 0), ("ranks", ranks, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"expected {what} to be an int of at least {least}, got {value!r}")
    if rank >= ranks:
        raise ValueError(f"expected rank to be less than ranks, got {rank} of {ranks}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"expected timeout to be a number of seconds, got {timeout!r}")
    found = Subscription(folder, names, split, rank, ranks, float(timeout))
    with found._version(None):
        pass
    return found


class Subscription:
    """A reader of published weights; ``spmd.subscribe`` makes it. ``version``: the one read last, 0 before.

    A version that is newer than the one read last is waited for with ``after``, at most the ``timeout`` seconds of
    ``subscribe``; otherwise the newest is read that there is.
    """

    def __init__(
        self, folder: Path, names: Names | None, split: Split | None, rank: int, ranks: int, timeout: float
    ) -> None:
        self.folder, self.version, self._timeout = folder, 0, timeout
        self._tables = (names, split, rank, ranks)
        self._run, self._held = "", 0  # the owner of the version that was held last, and its number
        self._token = ""
        self._layout: Layout | None = None
        self._engine: EngineLayout | None = None
        self._mapped: dict[str, MappedSegment] = {}
        self._process, self._reading = os.getpid(), threading.Lock()

    def __repr__(self) -> str:
        return f"<subscription to {self.folder}: version {self.version} read>"

    def newest(self) -> int:
        """The number of the newest version; 0 if there is none."""
        newest = read_newest(self.folder)
        return newest.version if newest is not None else 0

    def read(self, after: int | None = None) -> dict[str, torch.Tensor]:
        """New tensors on the CPU by name, with the values of one version, whose number ``version`` has then.

        ``after``: wait for a version above this one. Raises ``SpmdError`` if none comes, or who publishes has ended.
        """
        with self._version(after) as (engine, segments):
            found: dict[str, torch.Tensor] = {}
            first = engine.first_names()
            for name, wanted in engine.tensors.items():
                tied = first.get(name)
                if tied in found and engine.tensors[tied] == wanted:
                    found[name] = found[tied]
                    continue
                found[name] = torch.empty(wanted.shape, dtype=wanted.dtype)
                engine.fill(name, found[name], segments)
        self.version = self._held
        return found

    def load(self, target: nn.Module | Mapping[str, torch.Tensor], after: int | None = None) -> int:
        """Copy the values of one version into the tensors of a model, or of a dict by name; returns its number.

        They keep their memory, device and dtype. ``after``: as of ``read``. Raises ``ValueError`` with all that does
        not fit before anything is written: names that one side lacks, other shapes.
        """
        tensors = _tensors_of(target)
        with self._version(after) as (engine, segments), torch.no_grad():
            for name, tensor in _fitting(tensors, engine, self.folder).items():
                engine.fill(name, tensor, segments)
        self.version = self._held
        return self.version

    def close(self) -> None:
        """Let go of the files that are mapped."""
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()

    @contextmanager
    def _version(self, after: int | None) -> Iterator[tuple[EngineLayout, list[torch.Tensor]]]:
        """Hold a version while it is read."""
        if after is not None and type(after) is not int:
            raise TypeError(f"expected after to be the number of a version or None, got {after!r}")
        deadline = time.monotonic() + self._timeout
        if self._process != os.getpid():  # a forked child shares the locks of open files: it opens its own
            self._process, self._reading = os.getpid(), threading.Lock()
            self.close()
        while True:
            with self._reading, ExitStack() as held:  # and so do threads: one reads at a time
                newest = read_newest(self.folder)
                if newest is not None and self._is_newer(newest, after) and self._hold(newest, held):
                    self._run, self._held = newest.run, newest.version
                    yield self._engine_layout(), [self._mapped[name].bytes for name in newest.segments]
                    return
            self._check_goes_on(after, deadline)
            time.sleep(_POLL)

    def _is_newer(self, newest: Newest, after: int | None) -> bool:
        if self._run and newest.run == self._run:
            return after is None or newest.version > after
        return is_owned(self.folder)  # of another run, every version is a new one

    def _hold(self, newest: Newest, held: ExitStack) -> bool:
        """Map and hold the segments of a version; False if it is no more the newest."""
        try:
            self._read_layout(newest)
            assert self._layout is not None
            for name, size in zip(newest.segments, self._layout.sizes, strict=True):
                if name not in self._mapped:
                    self._mapped[name] = MappedSegment(self.folder / name, size)
                if not self._mapped[name].hold(newest.version):
                    return False
                held.callback(self._mapped[name].let_go)
        except FileNotFoundError:
            return False
        self._forget_all_but(newest)
        return True

    def _read_layout(self, newest: Newest) -> None:
        if newest.layout != self._token:
            path = self.folder / layout_name(newest.layout)
            self._layout, self._engine = Layout.from_bytes(path.read_bytes(), path), None
            self._token = newest.layout
            if len(self._layout.sizes) != len(newest.segments):
                raise SpmdError(f"expected {len(self._layout.sizes)} segments, as {path} has it, got {newest.segments}")

    def _engine_layout(self) -> EngineLayout:
        if self._engine is None:
            assert self._layout is not None, "it is read before segments are held"
            self._engine = EngineLayout(self._layout, *self._tables)
        return self._engine

    def _forget_all_but(self, newest: Newest) -> None:
        """Unmap what nobody writes to any more."""
        for name, segment in list(self._mapped.items()):
            if name not in newest.segments and (not name.startswith(newest.layout) or segment.is_removed()):
                self._mapped.pop(name).close()

    def _check_goes_on(self, after: int | None, deadline: float) -> None:
        """Raise ``SpmdError`` if a version that is waited for does not come."""
        above = "" if after is None else f" above {after}"
        if self._run and not is_owned(self.folder):
            raise SpmdError(
                f"expected a version{above} in {self.folder}, but the process that publishes there has ended, and "
                f"version {self._held} was its last that was read here: start it again, and read again"
            )
        if time.monotonic() >= deadline:
            owned = is_owned(self.folder)
            why = "the process that publishes there has published none" if owned else "no process publishes there"
            raise SpmdError(
                f"expected a version{above} in {self.folder} within {self._timeout:g} s, but {why}: pass a longer "
                "timeout=, and the name that spmd.publish has as `to`"
            )


def _tensors_of(target: Any) -> dict[str, torch.Tensor]:
    if isinstance(target, nn.Module):
        state = target.state_dict(keep_vars=True)
        return {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    if isinstance(target, Mapping) and all(isinstance(each, torch.Tensor) for each in target.values()):
        return dict(target)
    raise TypeError(f"expected a torch.nn.Module, or a dict of tensors by name, got {type(target).__name__}")


def _fitting(tensors: Mapping[str, torch.Tensor], engine: EngineLayout, folder: Path) -> Mapping[str, torch.Tensor]:
    """The tensors that are published, each once. Raises ``ValueError`` with all that does not fit."""
    first, wanted = engine.first_names(), engine.tensors
    has = {first.get(name, name) for name in wanted if name in tensors}  # of tied ones any name will do
    wrong = [f"{name}: is published, and missing here" for name in wanted if first.get(name, name) not in has]
    found: dict[Any, str] = {}  # by memory
    for name in (each for each in tensors if each in wanted):
        wrong += [f"{name}: {line}" for line in _differences(tensors[name], wanted[name])]
        other = found.setdefault(_memory_of(tensors[name]), name)
        if first.get(name, name) != first.get(other, other) or wanted[name] != wanted[other]:
            wrong.append(f"{name}: is {other} here, too, but where they are published they differ")
    wrong += [
        f"{name}: is not published"
        for name, each in tensors.items()
        if name not in wanted and _memory_of(each) not in found
    ]
    if wrong:
        lines = "\n  ".join([*wrong[:_SHOWN], *[f"... and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)])
        raise ValueError(
            f"the weights in {folder} do not fit:\n  {lines}\nPass names={{...}} to spmd.subscribe where names differ "
            "or tensors are fused, and split={...} for parts"
        )
    return {name: tensors[name] for name in found.values()}


def _memory_of(tensor: torch.Tensor) -> Any:
    """A value that is equal for two tensors of one memory, as are the entries of a state dict that are tied."""
    if isinstance(tensor, DTensor) or tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _differences(tensor: torch.Tensor, wanted: Target) -> Iterator[str]:
    if isinstance(tensor, DTensor):
        yield "is a DTensor here: pass a dict with its local part, and split= for that"
    elif tensor.is_meta:
        yield "is on the meta device here: give it memory first"
    elif is_expanded(tensor):
        yield "has elements that share memory here"
    elif tuple(tensor.shape) != wanted.shape:
        yield f"shape {list(wanted.shape)} is published, {list(tensor.shape)} is here"
    elif tensor.dtype != wanted.dtype and not (tensor.is_floating_point() and wanted.dtype.is_floating_point):
        yield f"{wanted.dtype} is published, {tensor.dtype} is here"
