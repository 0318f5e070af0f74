"""One model on one network: all systems are prepared and compared, then take their rounds in turn.

All of them are there at the same time, each in processes of its own, and only one at a time has anything to do: what
disturbs the machine for a while disturbs all of them alike, and no system's memory is another's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .models import Workload
from .network import Network
from .rank import Lap, Seat
from .systems import REFERENCE, System
from .team import SystemFailedError, Team, teams

TOLERANCE = 1e-5  # by which losses may differ, as a part of them: the order of fp32 sums


@dataclass(frozen=True)
class Pace:
    """``rounds`` rounds of ``steps`` steps for each system, after ``first`` steps whose losses are compared."""

    rounds: int = 15
    steps: int = 4
    first: int = 4


@dataclass
class Result:
    """What became of one system. ``failed`` says in a sentence why it has no figures."""

    system: System
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of a step, by round: the slowest rank's
    received: float = 0.0  # bytes of one rank and step
    transport: list[float] = field(default_factory=list)  # seconds of CPU time of a step, by round: the slowest rank's
    others: list[float] = field(default_factory=list)  # the same of all threads but the transport's
    copies: float = 0.0  # seconds of a step in ops that copy, a part of ``others``
    peak: int = 0  # bytes of one rank
    failed: str = ""

    @property
    def median(self) -> float:
        """Seconds of a step; infinitely many for a system that failed."""
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
    tell: Callable[[str], None],
) -> list[Result]:
    """A result for each system; ``folder`` is for files by which ranks find each other."""

    def seats(system: System, parts: int) -> list[Seat]:
        store = str(folder / f"store-{system.name}")
        return [Seat(system, workload, network, rank, ranks, parts, device, store) for rank in range(parts)]

    everyone = {REFERENCE.name: seats(REFERENCE, 1)} | {system.name: seats(system, ranks) for system in systems}
    with teams(everyone) as started:
        tell("the whole batch on one device")
        (reference,) = started[REFERENCE.name].order("prepare", pace.first)
        started.pop(REFERENCE.name).end()
        results = [Result(system) for system in systems]
        for result in results:
            tell(f"first steps of {result.system.name}")
            attempt(result, lambda result, team: prepare(result, team, pace, reference), started)
        for number in range(pace.rounds):
            tell(f"round {number + 1} of {pace.rounds}")
            for result in _turned(results, number):
                attempt(result, lambda result, team: take_round(result, team, pace), started)
        tell("memory and copies")
        for result in results:
            attempt(result, take_peak, started)
            attempt(result, take_copies, started)
    return results


def _turned(results: list[Result], number: int) -> list[Result]:
    """The order of a round: each time another system begins, so that none always runs behind the same one."""
    start = number % len(results)
    return results[start:] + results[:start]


def attempt(result: Result, task: Callable[[Result, Team], None], started: dict[str, Team]) -> None:
    """Give ``result``'s system its turn, unless it failed before."""
    if result.failed:
        return
    try:
        task(result, started[result.system.name])
    except SystemFailedError as failed:
        result.failed = str(failed)
        started[result.system.name].end()


def prepare(result: Result, team: Team, pace: Pace, reference: list[float]) -> None:
    """Build, compile and compare."""
    each = team.order("prepare", pace.first)  # [rank][step]: the rank's own mean, or that of all
    result.losses = [statistics.fmean(losses) for losses in zip(*each, strict=True)]
    if result.system.communicates:  # without, every rank trains a model of its own
        compare(result.losses, reference)


def compare(losses: Sequence[float], reference: Sequence[float]) -> None:
    """Raise ``SystemFailedError`` where a loss is not that of the whole batch on one device."""
    for step, (loss, expected) in enumerate(zip(losses, reference, strict=True), start=1):
        if not math.isclose(loss, expected, rel_tol=TOLERANCE):
            raise SystemFailedError(
                f"wrong: the loss of step {step} is {loss:.6f}, on one device with the whole batch {expected:.6f}"
            )


def take_round(result: Result, team: Team, pace: Pace) -> None:
    """Some more steps, on the clock."""
    laps: list[Lap] = team.order("lap", pace.steps)
    slowest = max(laps, key=lambda lap: lap.seconds)
    result.seconds.append(slowest.seconds / pace.steps)
    result.transport.append(slowest.spent.transport / pace.steps)
    result.others.append(slowest.spent.others / pace.steps)
    result.received = max(lap.received for lap in laps) / pace.steps


def take_peak(result: Result, team: Team) -> None:
    """One more step, off the clock."""
    result.peak = max(team.order("peak"))


def take_copies(result: Result, team: Team) -> None:
    """One more, under the profiler."""
    result.copies = max(team.order("copies"))
