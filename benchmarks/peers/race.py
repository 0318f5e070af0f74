"""A race: all systems train one model on one network, in turn.

All systems exist at the same time, each in processes of its own, and one at a time runs: a disturbance of the machine
affects all of them equally, and no system's memory counts for another.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .models import Workload
from .network import Network
from .rank import FirstSteps, Lap, RankSpec
from .systems import REFERENCE, System
from .team import SystemFailedError, Team, teams

_LEAST = 3  # rounds, however long they take
TOLERANCE = 1e-5  # relative difference of losses, from the order of fp32 sums


@dataclass(frozen=True)
class Pace:
    """``rounds`` rounds of ``steps`` steps for each system, after ``first`` steps whose losses are compared.

    But for the first three, none begins later than ``seconds`` after the start.
    """

    rounds: int = 15
    steps: int = 4
    first: int = 4
    seconds: float = math.inf


@dataclass
class Result:
    """The figures of one system, or in ``failed`` the reason why it has none, in a sentence."""

    system: System
    losses: list[float] = field(default_factory=list)
    first: float = 0.0  # seconds of the first steps, compiling included, of the slowest rank
    seconds: list[float] = field(default_factory=list)  # per step, by round, of the slowest rank
    received: float = 0.0  # bytes per rank and step
    transport: list[float] = field(default_factory=list)  # CPU seconds of the backend's threads, likewise
    others: list[float] = field(default_factory=list)  # CPU seconds of all other threads, likewise
    copies: float = 0.0  # seconds per step in ops that copy, a part of ``others``
    peak: int = 0  # bytes of one rank
    failed: str = ""

    @property
    def median(self) -> float:
        """Seconds per step; infinite for a system that failed."""
        return statistics.median(self.seconds) if self.seconds and not self.failed else math.inf


def race(
    workload: Workload,
    network: Network,
    systems: Sequence[System],
    pace: Pace,
    *,
    ranks: int,
    device: str,
    folder: Path,
    cold: bool,
    clears: str = "last",
    report: Callable[[str], None],
) -> list[Result]:
    """Run a race; returns a result for each system. ``folder`` is for the file stores of the process groups.

    ``cold``: Inductor finds nothing in its cache. ``clears``: when steps clear their gradients.
    """

    def specs(system: System, parts: int) -> list[RankSpec]:
        name = re.sub(r"\W+", "-", system.name)  # compilers take no commas in paths
        store, cache = str(folder / f"store-{name}"), str(folder / f"cache-{name}") if cold else ""
        return [
            RankSpec(system, workload, network, rank, ranks, parts, device, store, cache, clears)
            for rank in range(parts)
        ]

    start = time.perf_counter()
    everyone = {REFERENCE.name: specs(REFERENCE, 1)} | {system.name: specs(system, ranks) for system in systems}
    with teams(everyone) as started:
        report("the whole batch on one device")
        (reference,) = started[REFERENCE.name].order("prepare", pace.first)
        started.pop(REFERENCE.name).end()
        results = [Result(system) for system in systems]
        for result in results:
            report(f"first steps of {result.system.name}")
            attempt(result, lambda result, team: prepare(result, team, pace, reference), started)
        for number in range(pace.rounds):
            if number >= _LEAST and time.perf_counter() - start > pace.seconds:
                break
            report(f"round {number + 1} of {pace.rounds}")
            for result in _turned(results, number):
                attempt(result, lambda result, team: take_round(result, team, pace), started)
        report("memory and copies")
        for result in results:
            attempt(result, take_peak, started)
            attempt(result, take_copies, started)
    return results


def _turned(results: list[Result], number: int) -> list[Result]:
    """The order of a round: another system starts each time, so that none always runs after the same one."""
    start = number % len(results)
    return results[start:] + results[:start]


def attempt(result: Result, task: Callable[[Result, Team], None], started: dict[str, Team]) -> None:
    """Run a task of the system of ``result``, unless it failed before."""
    if result.failed:
        return
    try:
        task(result, started[result.system.name])
    except SystemFailedError as failed:
        result.failed = str(failed)
        started[result.system.name].end()


def prepare(result: Result, team: Team, pace: Pace, reference: FirstSteps) -> None:
    """Build and compile a system, and compare its first losses."""
    ranks: list[FirstSteps] = team.order("prepare", pace.first)  # losses: the mean of the rank, or that of all
    result.losses = [statistics.fmean(losses) for losses in zip(*(each.losses for each in ranks), strict=True)]
    result.first = max(each.seconds for each in ranks)
    if result.system.trains_on_the_whole_batch:  # else every rank trains a model of its own
        compare(result.losses, reference.losses)


def compare(losses: Sequence[float], reference: Sequence[float]) -> None:
    """Raise ``SystemFailedError`` where a loss differs from that of the whole batch on one device."""
    for step, (loss, expected) in enumerate(zip(losses, reference, strict=True), start=1):
        if not math.isclose(loss, expected, rel_tol=TOLERANCE):
            raise SystemFailedError(
                f"the loss of step {step} is {loss:.6f}, but {expected:.6f} on one device with the whole batch"
            )


def take_round(result: Result, team: Team, pace: Pace) -> None:
    """Measure the time of one round."""
    laps: list[Lap] = team.order("lap", pace.steps)
    slowest = max(laps, key=lambda lap: lap.seconds)
    result.seconds.append(slowest.seconds / pace.steps)
    result.transport.append(slowest.spent.transport / pace.steps)
    result.others.append(slowest.spent.others / pace.steps)
    result.received = max(lap.received for lap in laps) / pace.steps


def take_peak(result: Result, team: Team) -> None:
    """Measure peak memory in one more step."""
    result.peak = max(team.order("peak"))


def take_copies(result: Result, team: Team) -> None:
    """Measure the time in ops that copy, under the profiler."""
    result.copies = max(team.order("copies"))
