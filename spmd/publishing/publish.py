"""``spmd.publish``: put the weights of a model where other processes of the host read them, while it trains."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._torch import local_tensor
from ..checkpoints import background
from ..checkpoints.background import Handle
from ..checkpoints.folders import write_whole
from ..checkpoints.prepare import Prepared, prepare
from ..checkpoints.save import Together, on_all_ranks
from ..checkpoints.storage import file_numbers
from ..checkpoints.trees import leaves
from ..interpreter.interrupts import deferred_signals
from ..state.background_reads import READS, Read
from .folders import Newest, Owner, check_seen, folder_of, layout_name, read_newest
from .layout import Box, Layout, Tensor, box_of
from .segments import Segment

_READS, _LEAST = 16, 4_000_000  # at most, and bytes of one at least: an update waits for the one that reads it


class Publication(Handle):
    """A version that is published, which may still be under way. ``folder``: where; ``version``: its number."""

    kind = "publication"

    def __init__(self, folder: Path, version: int) -> None:
        super().__init__(folder)
        self.version = version

    def __repr__(self) -> str:
        return f"<version {self.version}, {super().__repr__()[1:]}"

    def withdraw(self) -> None:
        """Remove all versions from memory, as the end of the process does; all ranks call it.

        Readers keep what they are reading.
        """
        publisher = _publishers.get(self.folder)
        if publisher is not None and publisher.last is self:
            publisher.close()


def publish(
    model: nn.Module,
    *,
    to: str | os.PathLike[str],
    every: int = 1,
    dtype: torch.dtype | None = None,
    wait: bool = False,
) -> Publication:
    """Publish the parameters and persistent buffers of a model for other processes of the host; all ranks call it.

    Called in the loop, behind the step. Each rank writes its own parts, as they are split, to memory that processes
    which need no process group map: ``spmd.subscribe(to)`` reads whole tensors there, or the parts of an engine's rank.
    Versions count from 1. A reader gets a version whole or not at all, and neither side waits for the other. Programs
    stay as they are.

    - ``to``: a name, of a folder in ``/dev/shm``, or a path to a folder that is in memory. One model is published to
      it, by one run at a time. What a run has left that was killed, the next one removes.
    - ``every``: publish in every so many calls, from the first on; the others return at once.
    - ``dtype``: cast floating-point tensors to it.
    - ``wait``: by default the call returns at once, and a thread copies while the next step runs: parameters of
      compiled steps, on the CPU, are read where they are, and the first write to them waits for that. All else is
      copied before the call returns; with True, or while a save runs in the background, everything is.

    Returns the newest version's handle, with ``version``, ``done()``, ``wait()``, ``error`` and ``withdraw()``. A rank
    has its part in memory twice, and again for each older version that is still read. When the run or the model
    ends, all versions go: what is to stay, ``spmd.save`` and ``spmd.export`` write.

    Raises ``TypeError`` or ``ValueError`` for what cannot be published, and ``SpmdError`` on all ranks if one of them
    cannot write, or if the version before has failed; the newest one that is complete stays.
    """
    _check_arguments(model, every, dtype, wait)
    folder = folder_of(to)
    publisher = _publishers.get(folder)
    is_known = publisher is not None and publisher.model() is model
    if publisher is not None and is_known and not publisher.is_due(every):
        return publisher.last
    with on_all_ranks(f"publishing to {folder}") as ranks:
        given = ranks.run(lambda: [str(folder), every, str(dtype), _check_free(folder, model)])
        if any(each[:3] != given[0][:3] for each in given):
            ranks.fail(ValueError(f"expected the same to, every and dtype on all ranks, got {[e[:3] for e in given]}"))
        if publisher is None or not all(each[3] for each in given):
            publisher = _Publisher.start(folder, model, ranks)
        return publisher.publish(model, dtype, wait, ranks)


def _check_arguments(model: Any, every: Any, dtype: Any, wait: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {model!r}")
    if type(every) is not int or every < 1:
        raise ValueError(f"expected every to be a number of calls from 1 on, got {every!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"expected dtype to be a floating-point torch.dtype or None, got {dtype!r}")
    if not isinstance(wait, bool):
        raise TypeError(f"expected wait to be True or False, got {wait!r}")


def _check_free(folder: Path, model: nn.Module) -> bool:
    """Whether this model is published there already. Raises ``ValueError`` for a folder of another one."""
    for publisher in list(_publishers.values()):
        if publisher.model() is None:
            publisher.close()
    known = _publishers.get(folder)
    if known is not None and known.model() is not model:
        raise ValueError(
            f"expected a folder of this model alone, but {folder} has another model of this process: pass another "
            "name, or call withdraw() of its last handle first"
        )
    return known is not None


@dataclass(eq=False)
class _Publisher:
    """Publishes one model to a folder. ``owner``: on the first rank; ``run``: its token.

    ``key``: what the layout was made for, whose token is ``token``. ``segments``: of this rank, ``made`` so far.
    """

    folder: Path
    model: weakref.ref[nn.Module]
    owner: Owner | None
    run: str
    version: int
    calls: int = 1
    last: Publication = field(init=False)
    key: Any = None
    token: str = ""
    layout: Layout = field(default_factory=lambda: Layout({}, {}, [], []))
    segments: list[Segment] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        self.last = Publication(self.folder, self.version)
        self.last.end()

    @classmethod
    def start(cls, folder: Path, model: nn.Module, ranks: Together) -> _Publisher:
        """Take the folder. Raises on all ranks if it is another run's, or if some ranks do not see it."""
        owners: list[Owner] = []

        def claim() -> list[Any]:
            if folder in _publishers:  # where another rank has withdrawn it
                _publishers[folder].close()
            if ranks.rank == 0:
                owners.append(Owner.claim(folder))
            return [[each.run, each.version] for each in owners]

        try:
            (run, version), *_ = ranks.run(claim)[0]
        except BaseException:
            for owner in owners:  # where another rank has failed
                owner.release()
            raise
        gone = partial(_end_without_model, folder)
        publisher = cls(folder, weakref.ref(model, gone), owners[0] if owners else None, run, version)
        if not _publishers:  # in a process of multiprocessing, atexit runs nothing
            Finalize(None, _close_all, exitpriority=10)
        _publishers[folder] = publisher
        try:
            ranks.run(lambda: check_seen(folder, run))
        except BaseException:
            publisher.close()
            raise
        return publisher

    def is_due(self, every: int) -> bool:
        """Count a call; whether it publishes."""
        self.calls += 1
        return (self.calls - 1) % every == 0

    def publish(self, model: nn.Module, dtype: torch.dtype | None, wait: bool, ranks: Together) -> Publication:
        """Publish a version, or start to."""
        is_saving = any(ranks.run(self._end_the_one_before))
        prepared = prepare({"": model}, ranks, compares_trained=not self.token)
        tensors = _tensors(prepared, ranks)
        self._lay_out(tensors, prepared, dtype, ranks)
        self.version += 1
        version, found = self.version, list[Segment]()

        def prepare_segment() -> str:
            found.append(self._free_segment(ranks.rank))
            return found[0].path.name

        newest = Newest(self.run, version, self.token, tuple(ranks.run(prepare_segment)))
        work = _Work(self, found[0], newest, self._copies(found[0], tensors, ranks.rank))
        if wait or is_saving:
            ranks.run(work.copy_now)
            work.complete(ranks)
            self.last = Publication(self.folder, version)
            self.last.end()
            return self.last
        group = background.group_for(f"{self.run}-{version}", ranks)
        reads = list[Read]()
        live = frozenset(name[1:] for name in prepared.live)
        ranks.run(lambda: reads.extend(work.start(live)))
        publication = Publication(self.folder, version)
        with deferred_signals():  # or nobody would end what was started
            READS.start(reads, background.hooks_on([model]))
            background.start(publication, ranks, group, work.finish)
            self.last = publication
        return publication

    def _end_the_one_before(self) -> bool:
        """Wait for the publication before, and raise its error; whether a save runs."""
        running = background.last(Publication.kind)
        if running is not None:
            running.until_over()
        self.last.end_before_the_next()
        save = background.last(Handle.kind)
        return save is not None and not save.done()

    def _lay_out(
        self, tensors: Mapping[str, torch.Tensor], prepared: Prepared, dtype: torch.dtype | None, ranks: Together
    ) -> None:
        """Make the layout, unless that of the version before fits on all ranks."""
        whole = {name: Tensor(_published_as(each, dtype), tuple(each.shape)) for name, each in tensors.items()}
        ties = {name[1:]: first[1:] for name, first in prepared.ties.items()}
        boxes: dict[str, Box] = {}
        key = whole, ties, boxes

        def fits() -> bool:
            boxes.update(_boxes(tensors))
            return bool(self.key == key)

        if all(ranks.run(fits)):
            return
        gathered = [
            {name: (tuple(start), tuple(sizes)) for name, (start, sizes) in each.items()}
            for each in ranks.run(lambda: boxes)
        ]
        try:
            layout = Layout.of(whole, ties, gathered)
        except ValueError as error:  # the same on all ranks
            ranks.fail(error)

        def write() -> str:
            token = secrets.token_hex(8)
            write_whole(self.folder / layout_name(token), layout.to_bytes())
            return token

        self.token, self.layout, self.key = ranks.first(write), layout, key

    def _free_segment(self, rank: int) -> Segment:
        """A segment that nobody reads, and that is not of the newest version. Others like it go."""
        newest, found = read_newest(self.folder), list[Segment]()
        for segment in list(self.segments):
            if newest is not None and segment.path.name in newest.segments:
                continue
            fits = segment.path.name.startswith(self.token)
            is_free = segment.begin() if fits else True  # readers of an older layout keep what they have mapped
            if fits and is_free and not found:
                found.append(segment)
            elif is_free:
                self.segments.remove(segment)
                segment.close()
        if not found:
            self.made += 1
            path = self.folder / f"{self.token}-{rank}-{self.made}"
            found.append(Segment(path, self.layout.sizes[rank]))
            self.segments.append(found[0])
            found[0].begin()
        return found[0]

    def _copies(self, segment: Segment, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, _Copy]:
        own = [part for part in self.layout.parts if part.rank == rank]
        return {
            part.name: (part.of(segment.bytes, self.layout.tensors[part.name].dtype), local_tensor(tensors[part.name]))
            for part in own
        }

    def close(self) -> None:
        """Remove all versions, on the first rank, and let go of them, once nothing is written any more."""
        self.last.until_over()
        if _publishers.get(self.folder) is self:
            del _publishers[self.folder]
        self.forget()
        if self.owner is not None:
            self.owner.release()
            self.owner = None

    def forget(self) -> None:
        """Let go of the files."""
        for segment in self.segments:
            segment.leave()
        self.segments.clear()


_Copy = tuple[torch.Tensor, torch.Tensor]  # from the second to the first


@dataclass
class _Work:
    """The copies of one version, which this rank makes into a segment."""

    publisher: _Publisher
    segment: Segment
    newest: Newest
    copies: dict[str, _Copy]

    def copy_now(self) -> None:
        """Copy everything."""
        with self._written():
            _copy(self.copies.values())

    def start(self, live: frozenset[str]) -> Iterator[Read]:
        """Copy what may change without asking; yields the reads of the rest."""
        _copy(self.copies[name] for name in self.copies.keys() - live)
        left = {name: copy for name, copy in self.copies.items() if name in live}
        limit = max(sum(target.nbytes for target, _ in left.values()) // _READS, _LEAST)
        numbers = file_numbers({name: target.nbytes for name, (target, _) in left.items()}, limit)
        for number in sorted(set(numbers.values())):
            names = [name for name in left if numbers[name] == number]
            yield Read({name: left[name][1] for name in names}, partial(_copy, [left[name] for name in names]))
        self.copies.clear()  # the thread lets go of what it has read

    def finish(self, ranks: Together) -> None:
        """Copy the rest, on all ranks, and make the version the newest one."""
        ranks.run(self._run)
        self.complete(ranks)

    def _run(self) -> None:
        with self._written():
            READS.run()

    def complete(self, ranks: Together) -> None:
        """Make the version the newest one: it is written on all ranks."""
        owner = self.publisher.owner
        ranks.run(lambda: owner.publish(self.newest) if owner is not None else None)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Give the segment its version if all goes well."""
        try:
            yield
        except BaseException:
            self.segment.end()
            raise
        self.segment.end(self.newest.version)


@torch.no_grad()
def _copy(copies: Iterable[_Copy]) -> None:
    for target, source in copies:
        target.copy_(source)


def _tensors(prepared: Prepared, ranks: Together) -> dict[str, torch.Tensor]:
    """All tensors by name, of tied ones the first. Raises ``ValueError`` on all ranks for other state."""
    found = {name[1:]: tensor for name, tensor in prepared.tensors.items()}
    for name, leaf in leaves(prepared.trees[""], ""):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            ranks.fail(ValueError(f"{name[1:]} is no dense tensor, and nothing else is published"))
        if not leaf.is_meta and name not in prepared.ties:
            found[name[1:]] = leaf
    return found


def _boxes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Box]:
    """The box of each tensor that this rank has something of."""
    found: dict[str, Box] = {}
    for name, tensor in tensors.items():
        try:
            box = box_of(tensor)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error
        if box is not None:
            found[name] = box
    return found


def _published_as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


_publishers: dict[Path, _Publisher] = {}


def _end_without_model(folder: Path, model: weakref.ref[nn.Module]) -> None:
    """The model of a folder is gone, and so is what is published; if a thread is at it, by the next call or the end."""
    publisher = _publishers.get(folder)
    if publisher is not None and publisher.model is model and publisher.last.done():
        publisher.close()


def _close_all() -> None:
    for publisher in list(_publishers.values()):
        publisher.close()


def _forget() -> None:
    """A forked child publishes nothing; the locks are its parent's."""
    for publisher in _publishers.values():
        publisher.forget()
        if publisher.owner is not None:
            publisher.owner.forget()
    _publishers.clear()


os.register_at_fork(after_in_child=_forget)
