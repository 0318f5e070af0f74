"""Calibrate: measure what communication and compute cost here, as the ``Table`` that ``passes.Realise`` chooses by.

The algorithms for one kind of collective take turns, so that other load on the machine slows all of them equally;
medians count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from passes import Axis, Kind, Mesh, Table
from passes.analysis.collective_algorithms import ALGORITHMS, Algorithm, Link, Point, algorithms_along

from ..ranks.consensus import MeshRanks
from ..ranks.local_ranks import connect_local_ranks
from ..ranks.world import describe
from .measured_collectives import Operands
from .measured_compute import measurements, rates

SIZES = tuple(4096 * 4**k for k in range(7))  # bytes: 4 KiB to 16 MiB
_WARM_UP = 3

Progress = Callable[[str, int, int], None]  # what is measured next, how many are done, how many there are


def calibrate(
    mesh: DeviceMesh, sizes: Sequence[int] = SIZES, rounds: int = 20, progress: Progress | None = None
) -> Table:
    """Measure every axis of ``mesh`` that has several ranks. All ranks call it together and get the same table.

    ``sizes``: in bytes, of the longer of operand and result. ``rounds``: how often each is measured.
    """
    report = progress or (lambda *_: None)
    machine = _Machine(mesh.device_type, rounds)
    described, groups = _connected(mesh)
    connected, _ = connect_local_ranks(described, groups, _all_gather_text)
    axes = [axis for axis in connected.axes if axis.size > 1]
    todo = [(axis, kind, size) for axis, kind, size in product(axes, ALGORITHMS, sizes)]
    curves: dict[str, dict[tuple[Kind, Algorithm], tuple[Point, ...]]] = {axis.name: {} for axis in axes}
    for done, (axis, kind, size) in enumerate(todo):
        report(f"{kind} over {axis.name}, {size:,} bytes", done, len(todo) + 1)
        for algorithm, point in _measure(machine, axis, kind, size):
            before = curves[axis.name].get((kind, algorithm), ())
            curves[axis.name][kind, algorithm] = (*before, point)
    report("compute", len(todo), len(todo) + 1)
    compute = machine.rates()
    report("done", len(todo) + 1, len(todo) + 1)
    return Table("measured", tuple(Link(a.backend, a.name, a.size, curves[a.name]) for a in axes), compute)


def _connected(mesh: DeviceMesh) -> tuple[Mesh, dict[int, Any]]:
    """The axes of ``mesh``, and along which of them gloo moves data, in the groups of our own that steps use."""
    described = describe(mesh)
    connection = MeshRanks.of(mesh, None).connect("calibrate")
    several = [k for k, axis in enumerate(described.axes) if axis.size > 1]
    own = zip(several, connection.groups if connection else (), strict=True)
    groups = {k: group for k, group in own if described.axes[k].backend == "gloo"}
    axes = (replace(a, group=groups[k].group_name) if k in groups else a for k, a in enumerate(described.axes))
    return replace(described, axes=tuple(axes)), groups


def _all_gather_text(text: str) -> list[str]:
    """Every rank's ``text``. The mesh has all ranks of the world."""
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


@dataclass(frozen=True)
class _Machine:
    """The device to measure on, and the number of rounds."""

    device: str
    rounds: int

    def times(self, calls: Sequence[Callable[[], object]]) -> list[tuple[float, float]]:
        """The median seconds and CPU seconds of each call. The calls take turns."""
        for call in list(calls) * _WARM_UP:
            call()
        measured: list[list[tuple[float, float]]] = [[] for _ in calls]
        for _ in range(self.rounds):
            for call, times in zip(calls, measured, strict=True):
                times.append(self._time(call))
        return [(statistics.median(s for s, _ in times), statistics.median(c for _, c in times)) for times in measured]

    def _time(self, call: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        self.synchronize()
        start, cpu = time.perf_counter(), time.process_time()
        call()
        self.synchronize()
        return time.perf_counter() - start, time.process_time() - cpu

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def rates(self) -> dict[str, float]:
        """The rates of one rank while all compute, by the names of ``Table.compute``."""
        todo = list(measurements(self.device))
        seconds = self.slowest([elapsed for elapsed, _ in self.times([each.run for each in todo])])
        return rates(todo, seconds)

    def slowest(self, figures: Sequence[float]) -> list[float]:
        """The largest of each figure over all ranks, so that all have the same."""
        largest = torch.tensor(figures, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return [float(each) for each in largest]


def _measure(machine: _Machine, axis: Axis, kind: Kind, size: int) -> Iterator[tuple[Algorithm, Point]]:
    algorithms = algorithms_along(axis, kind, axis.backend)
    operands = Operands.of(axis, size, machine.device)
    times = machine.times([operands.collective(kind, algorithm) for algorithm in algorithms])
    for algorithm, each in zip(algorithms, times, strict=True):
        seconds, cpu = machine.slowest(each)
        yield algorithm, Point(operands.whole.nbytes, seconds, cpu)
