"""What collectives cost: measured figures by backend, kind, way and size, and which way is cheapest.

A *way* is how a collective is performed: by the backend's own op, or by others (``transport.py``). The built-in table
was measured on loopback; ``python -m spmd calibrate`` measures the user's machines, into a file for ``Table.read``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from .collectives import Kind
from .program import Axis


class Way(StrEnum):
    """How a collective is performed."""

    NATIVE = "native"  # the op of the backend that means it
    EXCHANGE = (
        "exchange"  # each rank gets its part of every rank's operand and adds them up; an all_reduce also gathers
    )
    BROADCAST = "broadcast"  # each rank broadcasts its part, all at once
    SENDING = "sending"  # each rank sends its part to each other


WAYS: dict[Kind, tuple[Way, ...]] = {
    Kind.ALL_REDUCE: (Way.NATIVE, Way.EXCHANGE),
    Kind.REDUCE_SCATTER: (Way.NATIVE, Way.EXCHANGE),
    Kind.ALL_GATHER: (Way.NATIVE, Way.BROADCAST, Way.SENDING),
}
"""What is measured and chosen from. Of equal ones the first is taken."""


@dataclass(frozen=True)
class Point:
    """One measured collective. ``bytes``: of the longer of operand and result. ``cpu``: CPU seconds of one rank."""

    bytes: int
    seconds: float
    cpu: float

    @property
    def cost(self) -> float:
        """Seconds to the result plus seconds taken from compute: a rank whose core communicates computes nothing."""
        return self.seconds + self.cpu


@dataclass(frozen=True)
class Link:
    """What was measured along one axis: for each kind and way, points in the order of their sizes."""

    backend: str
    axis: str
    ranks: int
    curves: Mapping[tuple[Kind, Way], tuple[Point, ...]]

    def cost(self, kind: Kind, way: Way, size: int) -> float | None:
        """The cost in seconds at ``size`` bytes, between points by a straight line; None if it was not measured."""
        points = self.curves.get((kind, way), ())
        if not points:
            return None
        if size <= points[0].bytes:
            return points[0].cost
        for one, other in pairwise(points):
            if size <= other.bytes:
                return one.cost + (other.cost - one.cost) * (size - one.bytes) / (other.bytes - one.bytes)
        return points[-1].cost * size / points[-1].bytes

    def cheapest(self, kind: Kind, size: int, ways: Sequence[Way] = ()) -> Way:
        """The way of the least cost of ``ways``, by default of all; the first one if none was measured."""
        ways = ways or WAYS[kind]
        costs = {way: cost for way in ways if (cost := self.cost(kind, way, size)) is not None}
        return min(costs, key=costs.__getitem__, default=ways[0])


@dataclass(frozen=True)
class Table:
    """All measured figures. ``compute``: rates of this machine, such as ``"matmul float32"`` in FLOP/s."""

    name: str
    links: tuple[Link, ...]
    compute: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Table({self.name!r})"

    def link(self, axis: Axis, backend: str) -> Link | None:
        """What fits ``axis`` best: of its backend, then of its name, then of the nearest number of ranks."""
        links = [link for link in self.links if link.backend == backend]
        return min(links, key=lambda each: (each.axis != axis.name, abs(each.ranks - axis.size)), default=None)

    def write(self, path: str | Path) -> None:
        """Write the table as JSON."""
        links = [
            {
                "backend": link.backend,
                "axis": link.axis,
                "ranks": link.ranks,
                "costs": [
                    {"kind": kind, "way": way, "bytes": point.bytes, "seconds": point.seconds, "cpu": point.cpu}
                    for (kind, way), points in link.curves.items()
                    for point in points
                ],
            }
            for link in self.links
        ]
        Path(path).write_text(json.dumps({"compute": dict(self.compute), "links": links}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """The table in a file that ``write`` made. Raises ``ValueError`` for any other file."""
        try:
            content = json.loads(Path(path).read_text())
            links = tuple(_link(each) for each in content["links"])
            compute = {str(name): float(rate) for name, rate in content["compute"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"expected {path} to be a table of costs as `python -m spmd calibrate` writes it, "
                f"but reading it failed: {type(error).__name__}: {error}"
            ) from error
        return cls(Path(path).name, links, compute)


def _link(content: Mapping[str, Any]) -> Link:
    curves: dict[tuple[Kind, Way], list[Point]] = {}
    for each in content["costs"]:
        point = Point(int(each["bytes"]), float(each["seconds"]), float(each["cpu"]))
        curves.setdefault((Kind(each["kind"]), Way(each["way"])), []).append(point)
    ordered = {key: tuple(sorted(points, key=lambda point: point.bytes)) for key, points in curves.items()}
    return Link(str(content["backend"]), str(content["axis"]), int(content["ranks"]), ordered)


_SIZES = (4_096, 65_536, 1_048_576, 4_194_304, 13_256_704)

# (milliseconds, milliseconds of CPU) at those sizes: 2 ranks on loopback, a core each, fp32, preallocated, torch 2.13.
_GLOO: dict[tuple[Kind, Way], tuple[tuple[float, float], ...]] = {
    (Kind.ALL_REDUCE, Way.NATIVE): ((0.12, 0.10), (0.20, 0.18), (0.55, 0.50), (3.7, 2.6), (11.0, 7.3)),
    (Kind.ALL_REDUCE, Way.EXCHANGE): ((0.30, 0.24), (0.40, 0.30), (0.75, 0.70), (3.0, 2.8), (10.2, 8.8)),
    (Kind.REDUCE_SCATTER, Way.NATIVE): ((0.18, 0.15), (0.25, 0.20), (3.7, 1.8), (5.6, 4.8), (16.0, 13.0)),
    (Kind.REDUCE_SCATTER, Way.EXCHANGE): ((0.14, 0.12), (0.19, 0.15), (0.32, 0.30), (1.5, 1.2), (5.2, 4.7)),
    (Kind.ALL_GATHER, Way.NATIVE): ((0.10, 0.09), (0.12, 0.11), (0.33, 0.30), (3.6, 2.0), (8.2, 5.6)),
    (Kind.ALL_GATHER, Way.BROADCAST): ((0.17, 0.15), (0.19, 0.17), (0.31, 0.29), (1.5, 1.3), (4.9, 4.1)),
    (Kind.ALL_GATHER, Way.SENDING): ((0.12, 0.10), (0.15, 0.13), (0.34, 0.32), (1.4, 1.4), (5.9, 5.0)),
}

BUILT_IN = Table(
    "built in",
    (
        Link(
            "gloo",
            "",
            2,
            {
                key: tuple(Point(size, wall / 1e3, cpu / 1e3) for size, (wall, cpu) in zip(_SIZES, curve, strict=True))
                for key, curve in _GLOO.items()
            },
        ),
    ),
)
"""What is known without measuring."""
