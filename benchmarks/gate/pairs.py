"""Pairs of fresh processes: both arms import, start, compile and run steps in turn, in the order A B, then B A.

Both arms of a pair are there at the same time, and one is at work: laps of some 50 ms alternate as A B B A, so that a
disturbance that lasts longer meets both.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..peers.models import Workload
from ..peers.network import Network
from ..peers.team import Team, teams
from .arms import Arm
from .preload import Imported
from .rank import ArmSpec, Lap

Sample = dict[str, Any]  # of one arm in one pair: spans by rank; of steps by lap and rank
PARTS = ("import", "warm", "compile", "step", "memory")
LAP = 0.05  # seconds of CPU time of a rank


@dataclass(frozen=True)
class Bench:
    """What all pairs have in common. ``folder``: for the stores of groups, and the arms' caches for warm starts."""

    arms: Sequence[Arm]
    workload: Workload
    network: Network
    folder: str
    parts: Sequence[str] = PARTS
    ranks: int = 2
    laps: int = 8

    def teams(self) -> AbstractContextManager[dict[str, Team]]:
        """Fresh processes of both arms, by name."""
        stores = tempfile.mkdtemp(dir=self.folder)
        return teams({arm.name: self._specs(arm, f"{stores}/{arm.name}") for arm in self.arms})

    def _specs(self, arm: Arm, store: str) -> list[ArmSpec]:
        cache = f"{self.folder}/cache-{arm.name}"
        ranks = range(self.ranks)
        return [ArmSpec(arm, self.workload, self.network, rank, self.ranks, store, cache) for rank in ranks]


class Explored(NamedTuple):
    """What an arm imports, and how many of its steps are a lap."""

    imported: Imported
    steps: int


def explore(bench: Bench, arm: Arm) -> Explored:
    """Run an arm once, unmeasured, which also fills its cache and writes bytecode."""
    with bench.teams() as started:
        team = started[arm.name]
        team.order("load")
        early = team.order("modules")[0]
        _calls(bench, team, arm, {})
        laps: list[Lap] = [lap for each in arm.clears for lap in team.order("lap", each, 10)]
        steps = max(1, round(LAP / max(lap.cpu for lap in laps)))
        return Explored(Imported(early, team.order("modules")[0]), steps)


def pairs(bench: Bench, steps: int) -> Iterator[dict[str, Sample]]:
    """Measure pairs, without end, with so many steps a lap: the sample of each arm, by name."""
    for order in itertools.cycle(itertools.permutations(bench.arms)):
        samples: dict[str, Sample] = {arm.name: {} for arm in order}
        with bench.teams() as started:
            for arm in order:
                samples[arm.name]["import"] = started[arm.name].order("load")
            for arm in order:
                _calls(bench, started[arm.name], arm, samples[arm.name])
            if "step" in bench.parts:
                _laps(bench, started, order, samples, steps)
            if "memory" in bench.parts:
                for arm in order:
                    samples[arm.name]["memory"] = started[arm.name].order("memory")
        yield samples


def _calls(bench: Bench, team: Team, arm: Arm, sample: Sample) -> None:
    """Join the group, and call steps for the first time: one that the cache has, then one of each spelling."""
    team.order("join")
    if "warm" in bench.parts:
        sample["warm"] = team.order("warm_call", arm.clears[0])
    sample["compile"] = [team.order("first_call", each) for each in arm.clears]


def _laps(bench: Bench, started: dict[str, Team], order: Sequence[Arm], samples: dict[str, Sample], steps: int) -> None:
    for lap in range(bench.laps):
        for number in range(len(order[0].clears)):
            for arm in order[:: -1 if lap % 2 else 1]:
                taken = started[arm.name].order("lap", arm.clears[number], steps)
                samples[arm.name].setdefault(f"step {number}", []).append(taken)
