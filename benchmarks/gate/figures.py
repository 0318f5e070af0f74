"""The figures of an arm in one pair: a number of seconds or bytes, and why this one.

Work beside a run stretches wall time by any factor, and CPU time by a few percent, since caches are cold when a process
gets its core back. CPU time does not see waits, such as for other ranks, the network or a file: the wall time of calls
is a figure, too, which tells on a quiet machine only. Of a step's wall time the fastest of some hundred steps is taken,
which nothing disturbed; what only some steps take longer, such as a collection of garbage, shows in its CPU time.

How far the ratio of one pair scatters (robust standard deviation), in pairs of one rank on two cores with 10 to 40
processes at work: import 4% by CPU time and 23% by wall time, compile 7% and 21%, a step 5% by its fastest, 6% by the
hundredth part, 17% by the quarter and 10% by the median; its CPU time 8% by the least lap, 4% by the lower quartile.
With 5%, about 120 pairs find a slow-down of 3% in nine of ten runs; with 2%, 25 pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arms import Arm
from .pairs import PARTS, Sample


@dataclass(frozen=True)
class Figure:
    """A row of the table; ``take`` gives the number of a sample, in ``unit``."""

    name: str
    unit: str
    take: Callable[[Sample], float]


def figures(arms: Sequence[Arm], parts: Sequence[str] = PARTS) -> list[Figure]:
    """The figures of these parts, as both arms have them."""
    found = {
        "step": [figure for number in range(len(arms[0].clears)) for figure in _steps(arms, number)],
        "compile": [
            Figure("compile", "s", lambda sample: sum(map(wall, sample["compile"]))),
            Figure("compile: CPU", "s", lambda sample: sum(map(cpu, sample["compile"]))),
        ],
        "warm": [
            Figure("warm start", "s", lambda sample: wall(sample["warm"])),
            Figure("warm start: CPU", "s", lambda sample: cpu(sample["warm"])),
        ],
        "import": [Figure("import", "s", lambda sample: min(span[1] for span in sample["import"]))],
        "memory": [Figure("memory", "MB", lambda sample: sum(sample["memory"]) / 1e6)],
    }
    return [figure for part, each in found.items() if part in parts for figure in each]


def _steps(arms: Sequence[Arm], number: int) -> list[Figure]:
    spellings = " and ".join(dict.fromkeys(arm.clears[number] for arm in arms))
    return [
        Figure(f"step, cleared {spellings}", "ms", lambda sample: 1e3 * undisturbed(sample[f"step {number}"])),
        Figure(f"step, cleared {spellings}: CPU", "ms", lambda sample: 1e3 * busy(sample[f"step {number}"])),
    ]


def wall(spans: Sequence[Sequence[float]]) -> float:
    """Wall seconds of the slowest rank."""
    return max(span[0] for span in spans)


def cpu(spans: Sequence[Sequence[float]]) -> float:
    """CPU seconds of all ranks."""
    return sum(span[1] for span in spans)


def undisturbed(laps: Sequence[Sequence[Sequence[Any]]]) -> float:
    """Seconds of the fastest step of all laps, on the slower rank."""
    return max(min(min(lap[0]) for lap in rank) for rank in zip(*laps, strict=True))


def busy(laps: Sequence[Sequence[Sequence[Any]]]) -> float:
    """CPU seconds of a step, of all ranks together: the lower quartile of the laps."""
    return float(np.quantile([sum(lap[1] for lap in ranks) for ranks in laps], 0.25))
