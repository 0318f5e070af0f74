"""Costs of collectives: measured figures by backend, kind, algorithm and size, and the cheapest algorithm.

An algorithm performs a collective: the backend's own op, or others (``message_collectives.py`` and its like). The
built-in table was measured on loopback, with gloo; ``python -m spmd calibrate`` measures the user's machines, into a
file for ``Table.read``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from ..ir.collectives import Kind
from ..ir.program import Axis
from ..ir.rates import UNMEASURED, Rate


class Algorithm(StrEnum):
    """The implementation of a collective."""

    NATIVE = "native"  # the backend's own op
    EXCHANGE = "exchange"  # each rank gets its part of every rank's operand and adds them up
    GATHER_BY_BROADCAST = "broadcast"  # each rank broadcasts its part, all at once
    GATHER_BY_SENDING = "sending"  # each rank sends its part to each other
    SHARED = "shared"  # through shared memory, where all ranks are on one host
    COALESCED = "coalesced"  # the backend's own op for each member of a bucket, all in one launch


ALGORITHMS: dict[Kind, tuple[Algorithm, ...]] = {
    Kind.ALL_REDUCE: (Algorithm.NATIVE, Algorithm.SHARED),
    Kind.REDUCE_SCATTER: (Algorithm.NATIVE, Algorithm.EXCHANGE, Algorithm.SHARED, Algorithm.COALESCED),
    Kind.ALL_GATHER: (
        Algorithm.NATIVE,
        Algorithm.GATHER_BY_BROADCAST,
        Algorithm.GATHER_BY_SENDING,
        Algorithm.SHARED,
        Algorithm.COALESCED,
    ),
    Kind.ALL_TO_ALL: (Algorithm.NATIVE,),
}
"""By kind, the algorithms to measure and to choose from; of equal costs the first is taken.

The built-in table has no figures of all_to_all, which takes the rate of its axis there.
"""

_BACKENDS: dict[str, set[Algorithm]] = {
    "gloo": {
        Algorithm.NATIVE,
        Algorithm.EXCHANGE,
        Algorithm.GATHER_BY_BROADCAST,
        Algorithm.GATHER_BY_SENDING,
        Algorithm.SHARED,
    },
    "nccl": {Algorithm.NATIVE, Algorithm.COALESCED},
}

MEASURED_MEMBERS = 8  # all of one size, in what is measured as coalesced
_LARGE = 1 << 20  # bytes of a member that is surely quicker to send than to copy


def algorithms_along(axis: Axis, kind: Kind, backend: str) -> tuple[Algorithm, ...]:
    """The algorithms that the ranks of ``axis`` can perform a collective by, through ``backend``."""
    known = _BACKENDS.get(backend, {Algorithm.NATIVE})
    return tuple(
        algorithm
        for algorithm in ALGORITHMS[kind]
        if algorithm in known and (axis.shared or algorithm is not Algorithm.SHARED)
    )


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
    """Measurements along one axis: for each kind and algorithm, points in the order of their sizes."""

    backend: str
    axis: str
    ranks: int
    curves: Mapping[tuple[Kind, Algorithm], tuple[Point, ...]]

    def cost(self, kind: Kind, algorithm: Algorithm, size: int) -> float | None:
        """The cost in seconds at ``size`` bytes; None if it was not measured."""
        points = self.curves.get((kind, algorithm), ())
        return _at(size, points) if points else None

    def point(self, kind: Kind, algorithm: Algorithm, size: int) -> Point | None:
        """Seconds and CPU seconds at ``size`` bytes, between the measured points as ``cost``; None if unmeasured."""
        points = self.curves.get((kind, algorithm), ())
        if not points:
            return None
        seconds = [Point(each.bytes, each.seconds, 0.0) for each in points]
        return Point(size, _at(size, seconds), _at(size, [Point(each.bytes, each.cpu, 0.0) for each in points]))

    def rate(self, axis: Axis) -> Rate | None:
        """Latency and time per byte along ``axis``, each collective by its cheapest algorithm; None if unmeasured.

        All kinds get one rate, the least latency and the median time per byte: a rank sends a byte about as fast for
        each of them, and what they differ by at the smallest size is noise where several collectives are added up.
        """
        fits = [fit for kind in ALGORITHMS if (fit := self._fit(kind, algorithms_along(axis, kind, self.backend)))]
        return Rate(min(f.latency for f in fits), median(f.per_byte for f in fits)) if fits else None

    def _fit(self, kind: Kind, algorithms: Sequence[Algorithm]) -> Rate | None:
        """The line through the least costs of the smallest and the largest size; None if it does not rise."""
        curves = [self.curves.get((kind, each), ()) for each in algorithms if each is not Algorithm.COALESCED]
        curves = [points for points in curves if points]
        if not curves:
            return None
        smallest, largest = min(points[0].bytes for points in curves), max(points[-1].bytes for points in curves)
        first, last = (min(_at(size, points) for points in curves) for size in (smallest, largest))
        sent = largest * (self.ranks - 1) / self.ranks * (2 if kind is Kind.ALL_REDUCE else 1)
        return Rate(first, (last - first) / sent) if last > first else None

    def cheapest(self, kind: Kind, size: int, algorithms: Sequence[Algorithm]) -> Algorithm:
        """The one of ``algorithms`` that costs least; the first one if none was measured."""
        costs = {algorithm: cost for algorithm in algorithms if (cost := self.cost(kind, algorithm, size)) is not None}
        return min(costs, key=costs.__getitem__, default=algorithms[0])


def _at(size: int, points: Sequence[Point]) -> float:
    """The cost at ``size`` bytes: between points by a straight line, beyond the last in proportion."""
    if size <= points[0].bytes:
        return points[0].cost
    for one, other in pairwise(points):
        if size <= other.bytes:
            return one.cost + (other.cost - one.cost) * (size - one.bytes) / (other.bytes - one.bytes)
    return points[-1].cost * size / points[-1].bytes


@dataclass(frozen=True)
class Table:
    """The measured costs of communication and compute.

    ``links``: of each axis that was measured; ``compute``: rates of this machine, as ``"matmul float32"`` in FLOP/s.
    """

    name: str
    links: tuple[Link, ...]
    compute: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Table({self.name!r})"

    def link(self, axis: Axis, backend: str) -> Link | None:
        """The link that fits ``axis`` best: of its backend, then of its name, then of the nearest number of ranks."""
        links = [link for link in self.links if link.backend == backend]
        return min(links, key=lambda each: (each.axis != axis.name, abs(each.ranks - axis.size)), default=None)

    def rate(self, axis: Axis, backend: str) -> Rate:
        """The rate of communication along ``axis``; ``UNMEASURED`` unless its backend was measured at two sizes."""
        link = self.link(axis, backend)
        return (link.rate(axis) if link else None) or UNMEASURED

    @property
    def digest(self) -> str:
        """A short text that is equal for tables of equal figures, whatever their names."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self._json().encode()).hexdigest()[:16]

    def coalesces(self, axis: Axis, backend: str, kind: Kind, size: int, members: int) -> bool:
        """Whether a collective on each of ``members``, ``size`` bytes in all, costs less than to copy them for one.

        Where that was not measured, it does if they are large. A launch of many small ones is slow: of 980 vectors, 21
        MB in all, it took 70 times as long as of one vector (https://github.com/NVIDIA/nccl/issues/725).
        """
        link, rate = self.link(axis, backend), self.compute.get("memory")
        one = link.cost(kind, Algorithm.NATIVE, size) if link else None
        group = link.cost(kind, Algorithm.COALESCED, MEASURED_MEMBERS * size // members) if link else None
        if one is None or group is None or rate is None:
            return size >= _LARGE * members
        return group * members / MEASURED_MEMBERS < one + 2 * size / rate  # a copy reads and writes

    def write(self, path: str | Path) -> None:
        """Write the table as JSON."""
        Path(path).write_text(self._json())

    def _json(self) -> str:
        links = [
            {
                "backend": link.backend,
                "axis": link.axis,
                "ranks": link.ranks,
                "costs": [
                    {
                        "kind": kind,
                        "algorithm": algorithm,
                        "bytes": point.bytes,
                        "seconds": point.seconds,
                        "cpu": point.cpu,
                    }
                    for (kind, algorithm), points in link.curves.items()
                    for point in points
                ],
            }
            for link in self.links
        ]
        return json.dumps({"compute": dict(self.compute), "links": links}, indent=1) + "\n"

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
    curves: dict[tuple[Kind, Algorithm], list[Point]] = {}
    for each in content["costs"]:
        point = Point(int(each["bytes"]), float(each["seconds"]), float(each["cpu"]))
        algorithm = each["algorithm"] if "algorithm" in each else each["way"]  # "way" until 2026-11
        curves.setdefault((Kind(each["kind"]), Algorithm(algorithm)), []).append(point)
    ordered = {key: tuple(sorted(points, key=lambda point: point.bytes)) for key, points in curves.items()}
    return Link(str(content["backend"]), str(content["axis"]), int(content["ranks"]), ordered)


_SIZES = tuple(4096 * 4**k for k in range(7))

# (milliseconds, milliseconds of CPU) at those sizes, as `python -m spmd calibrate` measures them: 2 ranks on loopback,
# a core each, torch 2.13. By messages, the least of six runs beside other work, four of which were before two ranks
# swapped halves; by memory, of three.
_GLOO: dict[tuple[Kind, Algorithm], tuple[tuple[float, float], ...]] = {
    (Kind.ALL_REDUCE, Algorithm.NATIVE): (
        (0.28, 0.24),
        (0.26, 0.24),
        (0.36, 0.29),
        (2.29, 0.38),
        (2.14, 1.13),
        (4.55, 3.04),
        (13.89, 11.25),
    ),
    (Kind.REDUCE_SCATTER, Algorithm.NATIVE): (
        (0.26, 0.25),
        (0.25, 0.24),
        (0.29, 0.29),
        (1.57, 0.46),
        (2.26, 1.05),
        (5.57, 3.51),
        (17.34, 14.62),
    ),
    (Kind.REDUCE_SCATTER, Algorithm.EXCHANGE): (
        (0.23, 0.23),
        (0.21, 0.20),
        (0.24, 0.23),
        (0.31, 0.29),
        (0.57, 0.52),
        (2.29, 1.72),
        (9.79, 6.88),
    ),
    (Kind.ALL_GATHER, Algorithm.NATIVE): (
        (0.19, 0.19),
        (0.21, 0.20),
        (0.21, 0.21),
        (0.30, 0.30),
        (0.62, 0.55),
        (3.44, 2.14),
        (11.21, 8.15),
    ),
    (Kind.ALL_GATHER, Algorithm.GATHER_BY_BROADCAST): (
        (0.27, 0.26),
        (0.28, 0.26),
        (0.33, 0.29),
        (0.39, 0.35),
        (1.46, 0.62),
        (2.35, 1.73),
        (7.79, 6.06),
    ),
    (Kind.ALL_GATHER, Algorithm.GATHER_BY_SENDING): (
        (1.59, 0.31),
        (0.49, 0.38),
        (1.65, 0.41),
        (2.34, 0.49),
        (2.36, 1.38),
        (3.23, 1.78),
        (7.00, 6.04),
    ),
    (Kind.ALL_REDUCE, Algorithm.SHARED): (
        (0.11, 0.11),
        (0.12, 0.12),
        (0.12, 0.13),
        (0.16, 0.16),
        (0.25, 0.25),
        (0.56, 0.56),
        (3.19, 3.2),
    ),
    (Kind.REDUCE_SCATTER, Algorithm.SHARED): (
        (0.14, 0.14),
        (0.15, 0.15),
        (0.15, 0.15),
        (0.17, 0.18),
        (0.23, 0.24),
        (0.45, 0.45),
        (1.73, 1.73),
    ),
    (Kind.ALL_GATHER, Algorithm.SHARED): (
        (0.14, 0.14),
        (0.14, 0.14),
        (0.14, 0.14),
        (0.18, 0.18),
        (0.24, 0.24),
        (0.45, 0.45),
        (2.02, 2.02),
    ),
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
"""The costs to use where nothing was measured."""
