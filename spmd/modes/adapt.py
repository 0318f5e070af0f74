"""``spmd.Auto(adapt=True)``: measured times of the first calls correct the table, and a better schedule takes over.

After calls that settle, some are timed whole, then some node by node, each program's by themselves. All ranks add up
what they measured, and so have the same corrected table, by which they compare the schedules of the program's own
placements. One that is estimated better by more than 3% is compiled between two calls: a thread beside training would
take the interpreter from its launches, and see torch patched while another step is traced. If its calls take longer
than those before, or are too few to say, the ranks go back.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

import passes
from passes import Pass, Program, SpmdError, Table
from passes.communication.bucket_sizes import MAX_BYTES
from passes.measured import MeasuredTime, collective_of
from passes.schedule.node_costs import device_of
from passes.schedule.op_work import work_of
from passes.schedule.overlap import Overlap
from passes.schedule.rates import rates_of

from ..interpreter.environment import is_set

SETTLES, TIMED, PROFILED = 3, 5, 3  # calls of one program, in this order
MOST = 50  # calls of all programs, before a change and after it: where they alternate, none may be called often enough
_GAIN = 0.03  # of the step: what is estimated to save less is not compiled
_FURTHEST = 8.0  # times that a rate may be off: what is measured of very little work says nothing of it
_COMMUNICATION = "communication"

Gather = Callable[[str], list[str]]  # a rank's text to all ranks' texts


@dataclass
class Adapting:
    """The calls of one step so far. ``note``: what was decided, for the report and the user.

    ``pipeline``: the passes of the program that is adapted; all others keep those of the mode. ``seconds``: of the
    calls of each program. ``before``: seconds of a call, before a change. ``changed``: the program that this made,
    whose calls alone are compared with these.
    """

    table: Table
    pipeline: tuple[Pass, ...]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    identity: int = 0
    calls: int = 0
    before: float = math.inf
    changed: int | None = None
    is_done: bool = False
    note: str = ""
    device: str = "cpu"
    start: float = 0.0

    def restart(self) -> None:
        """Count from the next call on: of one that failed, ranks have counted different numbers."""
        self.seconds.clear()
        self.calls = 0

    def begin(self, identity: int, device: str) -> int:
        """Start a call of a program: how many of its calls, from this one on, are to be measured node by node."""
        self.identity, self.device, self.start = identity, device, time.perf_counter()
        profiles = not self.is_done and self.changed is None and len(self._own) == SETTLES + TIMED
        return PROFILED if profiles else 0

    def end(self) -> None:
        """End it."""
        if self.is_done or self.calls >= MOST:
            return
        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()
        self._own.append(time.perf_counter() - self.start)
        self.calls += 1

    def say(self) -> None:
        """Print what was decided."""
        if not is_set("SPMD_QUIET"):
            print(self.note, file=sys.stderr)

    def is_due(self, identity: int) -> bool:
        """Whether to decide before the next call of a program; all ranks have made as many."""
        self.identity = identity
        if self.is_done or self.changed not in (None, identity):
            return False
        return len(self._own) == self._enough or self.calls >= MOST

    @property
    def _own(self) -> list[float]:
        return self.seconds.setdefault(self.identity, [])

    @property
    def _enough(self) -> int:
        return SETTLES + TIMED + (PROFILED if self.changed is None else 0)

    @property
    def took(self) -> float:
        """The seconds of a call of the program: the median of those that were timed; infinite if they are too few."""
        is_enough = len(self._own) >= self._enough
        return median(self._own[SETTLES : SETTLES + TIMED]) if is_enough else math.inf

    def decide(
        self, partitioned: Program, final: Program, measured: MeasuredTime | None, gather: Gather
    ) -> tuple[Pass, ...] | None:
        """The passes with which all ranks compile anew, if they do; they call this together, and decide the same."""
        slowest = max(float(text) for text in gather(repr(self.took)))
        if self.changed is not None:
            return self._goes_back(slowest)
        if slowest == math.inf:
            self.is_done = True
            self.note = f"spmd.Auto(adapt=True) measured nothing: in {MOST} calls, no program ran often enough"
            return None
        own = sums(final, self.table, measured) if measured is not None else {}
        ratios = ratios_of([json.loads(text) for text in gather(json.dumps(own))])
        table = corrected(final, self.table, ratios)
        found = [self.pipeline, *alternatives(self.pipeline, table, final)]
        estimated = [_seconds(partitioned, each, table) for each in found]
        agreed = [max(each) for each in zip(*map(json.loads, gather(json.dumps(estimated))), strict=True)]
        best = min(range(len(found)), key=agreed.__getitem__)
        gain = 1 - agreed[best] / agreed[0] if agreed[0] else 0.0
        self.is_done = gain <= _GAIN
        self.note = f"spmd.Auto measured {', '.join(f'{k} x {v:.2f}' for k, v in ratios.items())} of the table"
        if self.is_done:
            self.note += f"; no other schedule is estimated to save over {_GAIN:.0%}"
            return None
        self.note += f"; another schedule is estimated to save {gain:.0%}"
        self.before = slowest
        return found[best]

    def _goes_back(self, slowest: float) -> tuple[Pass, ...] | None:
        """The passes of before, if calls of the program that a change made take longer."""
        self.is_done = True
        took = (
            f"a call takes {_ms(slowest)}, and took {_ms(self.before)}"
            if slowest < math.inf
            else "too few calls ran it"
        )
        if slowest <= self.before:
            self.note += f"; {took}"
            return None
        self.note += f", but {took}: back to the schedule before"
        return self.pipeline

    def adopt(self, identity: int) -> None:
        """From now on the program of another schedule runs, and is measured."""
        self.changed = identity
        self.restart()

    def give_up(self, error: Exception) -> None:
        """Stay with the schedule that runs, since the other one does not compile."""
        self.is_done = True
        self.note += f", but it does not compile, and the one before stays: {type(error).__name__}: {error}"


def sums(program: Program, table: Table, measured: MeasuredTime) -> dict[str, tuple[float, float]]:
    """Seconds by estimate and as measured, by the kind of work, and of communication that compute waits for."""
    timeline = passes.estimate(program, table, with_memory=False)
    if timeline is None:
        return {}
    expected = {span.node: span.end - span.start for span in timeline.spans if not span.queue}
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for node in program.graph.nodes:
        if node.name in measured.nodes and node.name in expected and collective_of(node) is None:
            both = found[str(work_of(node).kind)]
            both[0] += expected[node.name]
            both[1] += measured.nodes[node.name]
    found[_COMMUNICATION] = [timeline.seconds - timeline.compute, measured.communication]
    return {kind: (both[0], both[1]) for kind, both in found.items()}


def ratios_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Ratios of measured to estimated seconds by kind of work, on all ranks together."""
    found: dict[str, float] = {}
    for kind in sorted({kind for each in ranks for kind in each}):
        expected, took = (sum(each[kind][k] for each in ranks if kind in each) for k in (0, 1))
        if expected > 0 and took > 0:
            found[kind] = min(_FURTHEST, max(1 / _FURTHEST, took / expected))
    return found


def corrected(program: Program, table: Table, ratios: Mapping[str, float]) -> Table:
    """The table by whose figures each kind of work takes as much longer as was measured."""
    rates = rates_of(table, device_of(program), program.mesh)
    figures = dict(rates.figures) if rates is not None else {}
    compute = {name: rate / ratios.get(name.split()[0], 1.0) for name, rate in figures.items()}
    times = ratios.get(_COMMUNICATION, 1.0)
    links = tuple(
        replace(
            link,
            curves={
                key: tuple(replace(each, seconds=each.seconds * times, cpu=each.cpu * times) for each in points)
                for key, points in link.curves.items()
            },
        )
        for link in table.links
    )
    return replace(table, compute=compute, links=links)


def alternatives(pipeline: Sequence[Pass], table: Table, program: Program) -> list[tuple[Pass, ...]]:
    """Other schedules that compute the same bits: overlap by ``table``, and other buckets where at most two ranks add.

    The place of an element in a bucket decides in which order more ranks add it up.
    """
    scheduled = tuple(replace(each, table=table) if isinstance(each, Overlap) else each for each in pipeline)
    if max((axis.size for axis in program.mesh.axes), default=1) > 2:
        return [scheduled]
    sizes = (MAX_BYTES // 25, MAX_BYTES // 5, MAX_BYTES * 5)
    return [scheduled, *(tuple(_with_buckets(each, size) for each in scheduled) for size in sizes)]


def _with_buckets(each: Any, size: int) -> Pass:
    made: Pass = replace(each, max_bytes=size) if getattr(each, "max_bytes", None) == MAX_BYTES else each
    return made


def _seconds(partitioned: Program, pipeline: tuple[Pass, ...], table: Table) -> float:
    try:
        found = passes.estimate(passes.run(partitioned, pipeline, check=False), table, with_memory=False)
    except SpmdError:  # of a schedule that does not run on this program
        return math.inf
    return found.seconds if found is not None else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
