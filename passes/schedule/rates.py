"""The rates of one device: from a table that was measured, else as built in for a CPU, or as published for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

from ..analysis.collective_algorithms import Link, Table
from ..ir.program import Axis, Mesh
from .gpus import AHEAD, GPUS, compute_of, published_link

COPIED = 1 << 26  # bytes of the copy that is measured as "memory"
MATRIX = 1024  # rows and columns of the matrices that are measured as "matmul float32"

BUILT_IN_CPU: dict[str, float] = {
    "matmul float32 64": 1.0e11,
    "matmul float32 256": 1.27e11,
    "matmul float32": 1.53e11,
    "matmul bfloat16 256": 2.7e10,
    "matmul float64 256": 6.2e10,
    "memory 65536": 1.4e10,
    "memory 1048576": 1.2e10,
    "memory": 1.2e10,
    "transcendental": 1.0e9,
    "launches": 2.9e5,
    "views": 7.0e5,
}
"""A core of a server of 2023, where the next one computes as well, as ``python -m spmd calibrate`` measures it."""

_Curve = tuple[tuple[float, float], ...]  # amounts of work, each with the seconds that it takes


@dataclass(frozen=True)
class Rates:
    """Rates of one device, in units a second, by the names of ``Table.compute``.

    ``"matmul float32"`` is the FLOP/s of products of 1,024 rows and columns, ``"matmul float32 64"`` those of 64;
    ``"memory"`` the bytes/s of a copy of 64 MiB, read and written, ``"memory 65536"`` those of one of 65536 bytes;
    ``"transcendental"`` elements, ``"launches"`` and ``"views"`` calls of the host; ``"host link"`` bytes/s of a copy
    from or to host memory. ``"host runs ahead"`` says that the host does not wait for the device.
    """

    figures: Mapping[str, float]
    gpu: str | None = None  # whose published links serve where none was measured
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def launch(self) -> float:
        """Seconds of the host for one op."""
        return self._seconds("launches")

    @property
    def view(self) -> float:
        """Seconds of the host for one view."""
        return self._seconds("views")

    @property
    def is_asynchronous(self) -> bool:
        """Whether the host runs ahead of the device."""
        return AHEAD in self.figures

    @property
    def host_link(self) -> float:
        """Bytes a second between host and device; 0 where they are one."""
        return self.figures.get("host link", 0.0)

    def transcendental(self, elements: int) -> float:
        """Seconds of a function such as ``exp`` of ``elements``; 0 where that is not known."""
        return elements * self._seconds("transcendental")

    def memory(self, size: int, fresh: int | None = None) -> float:
        """Seconds of an op that reads and writes ``size`` bytes; ``fresh``: of those, what it did not read before.

        A CPU reads fresh memory into its cache before it writes there. By default half of it is, as in a copy, which is
        what was measured: three bytes go between cache and memory for two.
        """
        if self.is_asynchronous or fresh is None:
            return _seconds_at(self._memory, size)
        return _seconds_at(self._memory, (size + fresh) * 2 / 3)

    def products(self, dtype: torch.dtype, flops: int, product: int) -> float:
        """Seconds of products with ``flops`` in all, ``product`` in each.

        Those of a dtype that was not measured take as long as float32's, or more if it has more bytes.
        """
        name = str(dtype).removeprefix("torch.")
        if name in self._products:
            return flops / product * _seconds_at(self._products[name], product)
        return flops / product * _seconds_at(self._products["float32"], product) * max(1, dtype.itemsize // 4)

    def link(self, axis: Axis, backend: str) -> Link | None:
        """The published link of an axis along which nothing was measured."""
        if self.gpu is None or backend != "nccl":
            return None
        return published_link(self.gpu, axis, self.mesh)

    def _seconds(self, name: str) -> float:
        return 1 / self.figures[name] if name in self.figures else 0.0

    @cached_property
    def _memory(self) -> _Curve:
        return _curve(self.figures, "memory", lambda size: 2 * size, COPIED)

    @cached_property
    def _products(self) -> dict[str, _Curve]:
        dtypes = {name.split()[1] for name in self.figures if name.startswith("matmul ")}
        return {dtype: _curve(self.figures, f"matmul {dtype}", lambda n: 2 * n**3, MATRIX) for dtype in dtypes}


def rates_of(table: Table, device: torch.device, mesh: Mesh, *, knows_gpu: bool = True) -> Rates | None:
    """The rates of a device; None if nothing is known of it.

    ``knows_gpu=False``: by the table alone, which all ranks share, and not by the name of this rank's own GPU.
    """
    gpu = _gpu_of(device) if knows_gpu else None
    if AHEAD in table.compute:  # the table is of another device, which this one stands for
        built_in = {}
    elif device.type == "cpu":
        built_in = BUILT_IN_CPU
    else:
        built_in = compute_of(gpu) if gpu is not None else {AHEAD: 1.0}
    measured = {_family(name) for name in table.compute}
    rest = {name: rate for name, rate in built_in.items() if _family(name) not in measured}
    figures = rest | dict(table.compute)
    known = {_family(name) for name in figures}
    return Rates(figures, gpu, mesh) if {"matmul float32", "memory"} <= known else None


def _family(name: str) -> str:
    """The name of a rate without the size that it was measured at."""
    return name.rstrip("0123456789").rstrip() if name.rpartition(" ")[2].isdigit() else name


def _gpu_of(device: torch.device) -> str | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    return max((gpu for gpu in GPUS if gpu in name), key=len, default=None)  # a GB200 is no B200


def _curve(figures: Mapping[str, float], name: str, work: Callable[[int], int], largest: int) -> _Curve:
    """The points measured for ``name``; without a size in its name it was measured at the ``largest``."""
    points = []
    for key, rate in figures.items():
        if _family(key) == name:
            amount = work(largest if key == name else int(key.rpartition(" ")[2]))
            points.append((amount, amount / rate))
    return tuple(sorted(points))


def _seconds_at(curve: _Curve, amount: float) -> float:
    """Between two points along a straight line; outside of them in proportion to the nearest one."""
    (first, least), (last, most) = curve[0], curve[-1]
    if amount <= first:
        return least * amount / first
    for (one, seconds), (other, later) in pairwise(curve):
        if amount <= other:
            return seconds + (later - seconds) * (amount - one) / (other - one)
    return most * amount / last
