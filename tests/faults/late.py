"""Communication at its latest: the windows between the start of a message and the wait for it, forced open.

A collective runs on copies. Until its wait, what it writes to has NaN in all bytes, so that an op which reads early, or
copies it, has NaN; and at the wait what it reads must still be as it was at the start, and what it writes to untouched.
So nothing depends on when a message leaves or arrives. A rank may also be slow at each start and at each wait, and all
waits last longer than the slices in which ranks wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from passes.runtime import coalesced_collectives, gloo, message_collectives


@dataclass
class Late:
    """What is in flight, how many messages there were, and sentences on memory that was handed on too early.

    ``pause``: the seconds that this rank sleeps at each start and at each wait.
    """

    pause: float = 0.0
    in_flight: list[LateWork] = field(default_factory=list)
    count: int = 0
    broken: list[str] = field(default_factory=list)

    def start(self, name: str, run: Callable[..., Any], read: Sequence[Tensor], written: Sequence[Tensor]) -> LateWork:
        """Start ``run(operands, results)`` on copies; ``written`` is NaN until the wait."""
        operands, results = [each.clone() for each in read], [each.clone() for each in written]
        for each in written:
            bytes_of(each).fill_(255)
        self.count += 1
        time.sleep(self.pause)
        work = LateWork(self, name, run(operands, results), [*zip(read, operands, strict=True)])
        work.written = [*zip(written, results, strict=True)]
        self.in_flight.append(work)
        return work


@dataclass(eq=False)
class LateWork:
    """A message, of which nothing has arrived before its wait."""

    late: Late
    name: str
    work: Any
    read: list[tuple[Tensor, Tensor]]
    written: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self, timeout: Any) -> bool:
        self.work.wait(timeout)
        if self not in self.late.in_flight:
            return True
        time.sleep(self.late.pause)
        self.late.in_flight.remove(self)
        if not all(torch.equal(bytes_of(each), bytes_of(copy)) for each, copy in self.read):
            self.late.broken.append(f"what {self.name} sends was written to before it had left")
        if not all(bool((bytes_of(each) == 255).all()) for each, _ in self.written):
            self.late.broken.append(f"what {self.name} writes to was written to before it had arrived")
        for each, result in self.written:
            each.copy_(result)
        return True


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


class LateGroup:
    """A process group whose coalesced collectives are late."""

    def __init__(self, late: Late, group: Any) -> None:
        self._late, self.group = late, group
        self.rank, self.size = group.rank, group.size

    def allgather_into_tensor_coalesced(self, wholes: list[Tensor], parts: list[Tensor]) -> LateWork:
        def run(operands: list[Tensor], results: list[Tensor]) -> Any:
            return self.group.allgather_into_tensor_coalesced(results, operands)

        if any(_overlap(part, whole) for part in parts for whole in wholes):  # which has this rank's part already
            return self._late.start("an all_gather", lambda *_: run(parts, wholes), parts, [])
        return self._late.start("an all_gather", run, parts, wholes)

    def reduce_scatter_tensor_coalesced(self, parts: list[Tensor], wholes: list[Tensor], options: Any) -> LateWork:
        def run(operands: list[Tensor], results: list[Tensor]) -> Any:
            return self.group.reduce_scatter_tensor_coalesced(results, operands, options)

        return self._late.start("a reduce_scatter", run, wholes, parts)


def _overlap(part: Tensor, whole: Tensor) -> bool:
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes


class LateDist:
    """``torch.distributed`` as the collectives of programs call it."""

    def __init__(self, late: Late) -> None:
        self._late = late

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def isend(self, x: Tensor, group: LateGroup, **options: Any) -> LateWork:
        return self._late.start("a send", lambda read, _: dist.isend(read[0], group=group.group, **options), [x], [])

    def irecv(self, x: Tensor, group: LateGroup, **options: Any) -> LateWork:
        return self._late.start("a recv", lambda _, out: dist.irecv(out[0], group=group.group, **options), [], [x])

    def all_reduce(self, x: Tensor, op: Any, group: LateGroup, async_op: bool) -> LateWork:
        def run(_: Any, results: list[Tensor]) -> Any:
            return dist.all_reduce(results[0], op, group.group, async_op=True)

        return self._late.start("an all_reduce", run, [], [x])

    def all_to_all_single(self, out: Tensor, x: Tensor, *lengths: Any, group: LateGroup, async_op: bool) -> LateWork:
        def run(operands: list[Tensor], results: list[Tensor]) -> Any:
            return dist.all_to_all_single(results[0], operands[0], *lengths, group=group.group, async_op=True)

        return self._late.start("an all_to_all", run, [x], [out])

    def broadcast(self, x: Tensor, group_src: int, group: LateGroup, async_op: bool) -> LateWork:
        def run(operands: list[Tensor], results: list[Tensor]) -> Any:
            return dist.broadcast([*operands, *results][0], group_src=group_src, group=group.group, async_op=True)

        is_source = group.rank() == group_src
        return self._late.start("a broadcast", run, [x] * is_source, [x] * (not is_source))


@contextmanager
def late_messages(pause: float = 0.0) -> Iterator[Late]:
    """All messages of programs are late."""
    late = Late(pause)

    def register(out: Tensor, work: Any, group: LateGroup, in_slices: bool = True) -> None:
        gloo.register(out, work, group.group, in_slices)

    def start_message(out: Tensor, start: Callable[..., Any], x: Tensor, group: LateGroup, **options: Any) -> None:
        register(out, start(x, group=group, **options), group, in_slices=False)

    with pytest.MonkeyPatch.context() as patch:
        for module in (message_collectives, coalesced_collectives):
            named = module.group_named
            patch.setattr(module, "group_named", lambda name, named=named: LateGroup(late, named(name)))
            patch.setattr(module, "register", register)
            patch.setattr(module, "dist", LateDist(late))
        patch.setattr(gloo, "_SLICE", 0.0005)
        patch.setattr(message_collectives, "is_gloo", lambda group: True)
        patch.setattr(message_collectives, "start_message", start_message)
        yield late
