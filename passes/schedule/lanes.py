"""A simulated pipeline as users see it: a lane for each rank of it, with a bar for each micro-batch in a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..ir.bundle import Bundle
from ..memory.bundle_memory import bundle_memory
from .bundle_simulation import BundleTimeline, Run


@dataclass(frozen=True)
class Bar:
    """A program from ``start`` to ``end``, in seconds; ``role``: ``forward.0``; ``micro_batch``: the number of it.

    ``micro_batch`` is None for what runs once.
    """

    role: str
    micro_batch: int | None
    start: float
    end: float

    @property
    def text(self) -> str:
        """``forward.0 of 3``."""
        return self.role if self.micro_batch is None else f"{self.role} of {self.micro_batch}"


@dataclass(frozen=True)
class Lane:
    """The work of the ranks at one coordinate: seconds that they wait for others, bytes at their peak, and the bars."""

    name: str
    idle: float
    peak: int
    bars: tuple[Bar, ...]

    @property
    def busy(self) -> float:
        """Seconds of its bars."""
        return sum(each.end - each.start for each in self.bars)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Lane:
        """Build from the plain data that ``dataclasses.asdict`` makes."""
        return cls(given["name"], given["idle"], given["peak"], tuple(Bar(**each) for each in given["bars"]))


def lanes_of(bundle: Bundle, call: str, timeline: BundleTimeline) -> tuple[Lane, ...]:
    """The lanes of a call, by coordinate."""
    peaks = [bundle_memory(bundle, call, k).planned.peak for k in range(len(timeline.runs))]
    return tuple(
        Lane(f"{bundle.axis}={k}", timeline.idle[k], peak, tuple(_bars(bundle, call, k, timeline.runs[k])))
        for k, peak in enumerate(peaks)
    )


def _bars(bundle: Bundle, call: str, coordinate: int, runs: tuple[Run, ...]) -> Iterator[Bar]:
    order = bundle.order(call, coordinate)
    for each in runs:
        if each.end > each.start:
            yield Bar(each.role, each.number if order.count(each.role) > 1 else None, each.start, each.end)
