"""Measure what communication and compute cost here: a ``Table`` that ``passes.Realise`` chooses by.

Each collective is performed as a compiled step performs it, into memory that is there already. The algorithms for a
kind take turns, so that whatever else the machine does slows all of them alike; medians count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes import Axis, Kind, Table
from passes.analysis.costs import ALGORITHMS, MEASURED_MEMBERS, Algorithm, Link, Point, algorithms_along
from passes.ir.collectives import OUT_VARIANTS, WAIT, c10d
from passes.runtime.coalesced_collectives import coalesced_all_gather, coalesced_reduce_scatter
from passes.runtime.collective_ops import part
from passes.runtime.message_collectives import exchange, gather_by_broadcast, gather_by_sending, swap
from passes.runtime.segments import allocate_segment
from passes.runtime.shared_memory_collectives import shared_all_gather, shared_all_reduce, shared_reduce_scatter

from ..ranks.local_ranks import connect_local_ranks
from ..ranks.world import describe

SIZES = tuple(4096 * 4**k for k in range(7))  # bytes: 4 KiB to 16 MiB
_WARM_UP = 3
_MATRIX = 1024  # rows and columns of the matrices that are multiplied
_COPIED = 1 << 26  # bytes
_PATIENCE = 60.0  # seconds in which the ranks of a host connect

Progress = Callable[[str, int, int], None]  # what is measured, how many are done, how many there are


def calibrate(
    mesh: DeviceMesh, sizes: Sequence[int] = SIZES, rounds: int = 20, progress: Progress | None = None
) -> Table:
    """The figures of every axis of ``mesh`` that has several ranks; all ranks call it together and get the same table.

    ``sizes``: in bytes, of the longer of operand and result. ``rounds``: how often each is measured.
    """
    machine = _Machine(mesh.device_type, rounds)
    axes = [axis for axis in connect_local_ranks(describe(mesh), mesh, _share, _PATIENCE).axes if axis.size > 1]
    todo = [(axis, kind, size) for axis, kind, size in product(axes, ALGORITHMS, sizes)]
    curves: dict[str, dict[tuple[Kind, Algorithm], tuple[Point, ...]]] = {axis.name: {} for axis in axes}
    for done, (axis, kind, size) in enumerate(todo):
        if progress:
            progress(f"{kind} over {axis.name}, {size:,} bytes", done, len(todo) + 1)
        for algorithm, point in _measured(machine, axis, kind, size):
            before = curves[axis.name].get((kind, algorithm), ())
            curves[axis.name][kind, algorithm] = (*before, point)
    if progress:
        progress("compute", len(todo), len(todo) + 1)
    compute = machine.rates()
    if progress:
        progress("done", len(todo) + 1, len(todo) + 1)
    return Table("measured", tuple(Link(a.backend, a.name, a.size, curves[a.name]) for a in axes), compute)


def _share(text: str) -> list[str]:
    """Every rank's ``text``: the mesh has all of them."""
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, text)
    return told


@dataclass(frozen=True)
class _Machine:
    """Where it is measured, and how often."""

    device: str
    rounds: int

    def times(self, calls: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
        """For each call the medians of its seconds and its CPU seconds; they take turns."""
        for call in list(calls) * _WARM_UP:
            call()
        seen: list[list[tuple[float, float]]] = [[] for _ in calls]
        for _ in range(self.rounds):
            for call, its in zip(calls, seen, strict=True):
                its.append(self._one(call))
        return [(statistics.median(s for s, _ in its), statistics.median(c for _, c in its)) for its in seen]

    def _one(self, call: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        self.settle()
        start, cpu = time.perf_counter(), time.process_time()
        call()
        self.settle()
        return time.perf_counter() - start, time.process_time() - cpu

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def rates(self) -> dict[str, float]:
        """What one rank computes while all do: FLOP/s of matrix products, bytes/s read and written."""
        a, b = (torch.rand(_MATRIX, _MATRIX, device=self.device) for _ in range(2))
        c, copy = torch.empty_like(a), torch.zeros(_COPIED // 4, device=self.device)
        other = torch.zeros_like(copy)
        (multiply, _), (move, _) = self.times([lambda: torch.mm(a, b, out=c), lambda: other.copy_(copy)])
        slowest = self.slowest([multiply, move])
        return {"matmul float32": 2 * _MATRIX**3 / slowest[0], "memory": 2 * _COPIED / slowest[1]}

    def slowest(self, figures: Sequence[float]) -> list[float]:
        """For each figure the largest of all ranks, so that all have the same."""
        largest = torch.tensor(figures, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [float(each) for each in largest]


def _measured(machine: _Machine, axis: Axis, kind: Kind, size: int) -> Iterator[tuple[Algorithm, Point]]:
    algorithms = algorithms_along(axis, kind, axis.backend)
    buffers = _Buffers.of(axis, size, machine.device)
    times = machine.times([buffers.performing(kind, algorithm) for algorithm in algorithms])
    for algorithm, each in zip(algorithms, times, strict=True):
        seconds, cpu = machine.slowest(each)
        yield algorithm, Point(buffers.whole.nbytes, seconds, cpu)


@dataclass(frozen=True)
class _Buffers:
    """Operands and results of one size, which all algorithms share."""

    axis: Axis
    whole: torch.Tensor  # (ranks * size of a part,)
    other: torch.Tensor  # the same
    part: torch.Tensor  # (size of a part,)
    rows: torch.Tensor  # (ranks, size of a part)

    @classmethod
    def of(cls, axis: Axis, size: int, device: str) -> _Buffers:
        """Of ``size`` bytes, or what is next that every rank has the same part of."""
        length = max(1, size // 4 // axis.size)
        whole = torch.zeros(axis.size * length, device=device)
        return cls(axis, whole, torch.zeros_like(whole), whole[:length].clone(), whole.view(axis.size, -1).clone())

    def performing(self, kind: Kind, algorithm: Algorithm) -> Callable[[], object]:
        """What performs a collective of this kind by this algorithm, and waits for it."""
        if algorithm is Algorithm.NATIVE:
            return self._natively(kind)
        if algorithm is Algorithm.SHARED:
            return self._through_memory(kind)
        if algorithm is Algorithm.COALESCED:
            return self._coalesced(kind)
        if kind is Kind.ALL_GATHER:
            return lambda: self._gather(algorithm, self.other)
        return self._reduce

    def _natively(self, kind: Kind) -> Callable[[], object]:
        ranks, group = self.axis.size, self.axis.group
        if kind is Kind.ALL_GATHER:
            gather = OUT_VARIANTS[c10d.all_gather_into_tensor.default]
            return lambda: WAIT(gather(self.part, ranks, group, out=self.other))
        if kind is Kind.REDUCE_SCATTER:
            scatter = OUT_VARIANTS[c10d.reduce_scatter_tensor.default]
            return lambda: WAIT(scatter(self.whole, "sum", ranks, group, out=self.part))
        reduce = OUT_VARIANTS[c10d.all_reduce.default]
        return lambda: WAIT(reduce(self.whole, "sum", group, out=self.whole))

    def _through_memory(self, kind: Kind) -> Callable[[], object]:
        ranks, group, length = self.axis.size, self.axis.group, len(self.part)
        if kind is Kind.ALL_GATHER:
            part = _seen(self.part)
            return lambda: WAIT(shared_all_gather.out(part, [length], ranks, group, out=self.other))
        whole = _seen(self.whole)
        if kind is Kind.REDUCE_SCATTER:
            return lambda: WAIT(shared_reduce_scatter.out(whole, "sum", [length], ranks, group, out=self.part))
        scratch = _seen(self.part) if ranks > 2 else None
        return lambda: WAIT(shared_all_reduce.out(whole, scratch, "sum", group, out=self.other))

    def _coalesced(self, kind: Kind) -> Callable[[], object]:
        ranks, group, length = self.axis.size, self.axis.group, len(self.part)
        members = [part(length, MEASURED_MEMBERS, k) for k in range(MEASURED_MEMBERS)]
        if kind is Kind.ALL_GATHER:
            return lambda: WAIT(coalesced_all_gather.out(self.part, members, ranks, group, out=self.other))
        return lambda: WAIT(coalesced_reduce_scatter.out(self.whole, "sum", members, ranks, group, out=self.part))

    def _reduce(self) -> None:
        length = len(self.part)
        if self.axis.size == 2:
            own = self.whole[self.axis.coordinate * length :][:length]
            other = WAIT(swap.out(self.whole, length, self.axis.group, out=self.rows[0]))
            torch.add(own, other, out=self.part)
        else:
            rows = WAIT(exchange.out(self.whole, self.axis.size, length, self.axis.group, out=self.rows))
            torch.sum(rows, 0, out=self.part)

    def _gather(self, algorithm: Algorithm, out: torch.Tensor) -> None:
        gather = gather_by_broadcast if algorithm is Algorithm.BROADCAST else gather_by_sending
        WAIT(gather.out(self.part, len(out), self.axis.size, self.axis.group, out=out))


def _seen(like: torch.Tensor) -> torch.Tensor:
    """Memory for ``like`` that the other ranks of this host can look at."""
    return allocate_segment(like.nbytes).view(like.dtype)
