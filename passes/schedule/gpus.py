"""Published figures of GPUs and of what connects them, as tables of costs, for machines that nobody has measured.

A step on 512 ranks can be estimated with them on a laptop::

    table = passes.published("H100", mesh)
    step = spmd.compile(passes=passes.default(table=table), ...)

Published are peaks. What programs reach of them is assumed, or measured on one GPU (``ACHIEVED``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..analysis.collective_algorithms import Algorithm, Link, Point, Table
from ..errors import did_you_mean
from ..ir.collectives import Kind
from ..ir.program import Axis, Mesh


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU, dense.

    ``tflops`` by dtype, ``memory`` in TB/s, ``nvlink`` and ``network`` in GB/s that one GPU sends while it receives as
    much; ``host_link`` likewise, to and from host memory. ``capacity``: GB of memory; ``processors``: SMs; ``domain``:
    how many GPUs NVLink connects in a system as it is sold; ``float4``: how many times faster than 16 bits 4 bits are.
    ``power``: watts for each FLOP/s of the peak in 16 bits, beside those of the first GPU of its generation in a DGX.
    """

    tflops: Mapping[str, float]
    memory: float
    nvlink: float
    network: float
    host_link: float
    capacity: float
    processors: int
    domain: int = 8
    float4: float = 1.0
    power: float = 1.0
    has_tf32: bool = True  # half as fast as 16 bits

    def peak(self, dtype: str) -> float:
        """FLOP/s of products of a dtype; of one without a figure, of float32, which may be computed as TF32.

        torch does that where ``torch.set_float32_matmul_precision`` allows it.
        """
        if dtype in self.tflops and dtype != "float32":
            return self.tflops[dtype] * 1e12
        is_rounded = self.has_tf32 and torch.get_float32_matmul_precision() != "highest"
        return (self.tflops["bfloat16"] / 2 * TF32 if is_rounded else self.tflops["float32"]) * 1e12


def _tflops(half: float, float32: float, float64: float, float8: float | None = None) -> dict[str, float]:
    """``float8``: None where the GPU has none."""
    eights = {} if float8 is None else {"float8_e4m3fn": float8, "float8_e5m2": float8}
    return {"float16": half, "bfloat16": half, "float32": float32, "float64": float64, **eights}


GPUS: dict[str, Gpu] = {
    # NVIDIA V100 datasheet (SXM2, 32 GB); DGX-1V: four 100 Gb/s cards for eight GPUs; PCIe 3.0 x16. It has no bfloat16
    # of its own; that of float16 is given.
    "V100": Gpu(_tflops(125, 15.7, 7.8), 0.9, 150, 6.25, 16, 32, 80, has_tf32=False),
    # NVIDIA A100 datasheet (SXM, 80 GB); DGX A100 datasheet: a 200 Gb/s ConnectX-6 for each GPU; PCIe 4.0 x16.
    "A100": Gpu(_tflops(312, 19.5, 19.5), 2.039, 300, 25, 32, 80, 108),
    # The same with 40 GB of HBM2.
    "A100-40": Gpu(_tflops(312, 19.5, 19.5), 1.555, 300, 25, 32, 40, 108),
    # NVIDIA H100 datasheet (SXM; half of what it gives with sparsity); DGX H100 datasheet: a 400 Gb/s ConnectX-7 for
    # each GPU; PCIe 5.0 x16.
    "H100": Gpu(_tflops(989.4, 66.9, 66.9, 1978.9), 3.35, 450, 50, 64, 80, 132),
    # The same datasheet (PCIe): pairs of GPUs by an NVLink bridge, all others by PCIe, which is the slower one; 350 W.
    "H100-PCIe": Gpu(_tflops(756, 51, 26, 1513), 2.0, 64, 50, 64, 80, 114, power=0.65),
    # NVIDIA H200 datasheet (SXM): the compute of an H100.
    "H200": Gpu(_tflops(989.4, 66.9, 66.9, 1978.9), 4.8, 450, 50, 64, 141, 132),
    # NVIDIA DGX B200 datasheet, an eighth of it each (half of what it gives with sparsity); a 400 Gb/s ConnectX-7 for
    # each GPU; PCIe 5.0 x16. HGX B200 datasheet: float32 and float64.
    "B200": Gpu(_tflops(2250, 75, 37, 4500), 8.0, 900, 50, 64, 180, 148, float4=4),
    # NVIDIA DGX B300 datasheet: 4-bit products half as fast again, an 800 Gb/s ConnectX-8 for each GPU.
    # 1,100 W, those of a B200 are 1,000.
    "B300": Gpu(_tflops(2250, 75, 1.2, 4500), 8.0, 900, 100, 64, 270, 148, float4=6, power=1.1),
    # NVIDIA GB200 NVL72 datasheet, a 72nd of it each: NVLink connects 72 GPUs; 1,200 W.
    "GB200": Gpu(_tflops(2500, 80, 40, 5000), 8.0, 900, 50, 64, 186, 148, 72, 4, power=1.08),
    # NVIDIA GB300 NVL72 datasheet, likewise; 1,400 W.
    "GB300": Gpu(_tflops(2500, 80, 1.3, 5000), 8.0, 900, 100, 64, 279, 148, 72, 6, power=1.26),
}

ACHIEVED = {"matmul": 0.6, "memory": 0.85, "nvlink": 0.8, "network": 0.9, "host link": 0.8}
"""The fraction of each peak that programs reach: assumptions, but for products, which reached this on one H200."""

TF32 = 0.55
"""The part of that which a product in TF32 reaches of its own peak, on one H200."""

LAUNCH, VIEW, KERNEL = 15e-6, 6e-6, 3e-6
"""Seconds of the host for a kernel, and for a view, and of the device for the smallest kernel, on one H200."""

AHEAD = "host runs ahead"  # in the place of a rate: of a device that computes while its host launches

RANKS_PER_HOST = 8  # of DGX and HGX systems

# NCCL's own model of its rings, by protocol: microseconds to begin, for a step over NVLink and for one over the
# network, and the part of the bandwidth that it reaches (NCCL 2.8, src/graph/tuning.cc, on
# https://github.com/NVIDIA/nccl). NCCL takes the quickest.
_PROTOCOLS: tuple[tuple[float, float, float, float], ...] = (
    (3.6, 0.47 * 1.8, 2.7, 0.25),  # LL
    (10.0, 1.9, 4.0, 0.92),  # LL128
    (8.4, 3.4, 9.6, 1.0),  # Simple
)
_SIZES = tuple(4096 * 4**k for k in range(11))  # bytes: 4 KiB to 4 GiB
_KINDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def published(gpu: str, mesh: Mesh, ranks_per_host: int = RANKS_PER_HOST) -> Table:
    """The table of ``mesh`` on GPUs of this name, ``ranks_per_host`` in a host. Raises ``ValueError`` for unknown GPUs.

    Ranks that follow each other are on one host.
    """
    if gpu not in GPUS:
        raise ValueError(
            f"expected a GPU with published figures, one of {', '.join(GPUS)}, got {gpu!r}{did_you_mean(gpu, GPUS)}"
        )
    links = tuple(published_link(gpu, axis, mesh, ranks_per_host) for axis in mesh.axes if axis.size > 1)
    return Table(f"{gpu}, published", links, compute_of(gpu))


def compute_of(gpu: str) -> dict[str, float]:
    """The rates of ``Table.compute`` by the published figures."""
    figures = GPUS[gpu]
    products = {f"matmul {dtype}": ACHIEVED["matmul"] * figures.peak(dtype) for dtype in figures.tflops}
    return products | {
        "memory": ACHIEVED["memory"] * figures.memory * 1e12,
        "memory 1024": 2 * 1024 / KERNEL,
        "host link": ACHIEVED["host link"] * figures.host_link * 1e9,
        "launches": 1 / LAUNCH,
        "views": 1 / VIEW,
        AHEAD: 1.0,
    }


def published_link(gpu: str, axis: Axis, mesh: Mesh, ranks_per_host: int = RANKS_PER_HOST) -> Link:
    """NCCL along one axis, by its model of a ring: through every rank of a host, then by all of their network cards."""
    stride = 1
    for other in reversed(mesh.axes):
        if other.name == axis.name.partition("/")[0]:
            break
        stride *= other.size
    on_a_host = max(1, min(axis.size, ranks_per_host // stride))
    hosts = -(-axis.size // on_a_host)
    curves = {
        (kind, Algorithm.NATIVE): tuple(
            Point(size, _ring(GPUS[gpu], kind, size, axis.size, hosts, on_a_host), 0.0) for size in _SIZES
        )
        for kind in _KINDS
    }
    return Link("nccl", axis.name, axis.size, curves)


def _ring(gpu: Gpu, kind: Kind, size: int, ranks: int, hosts: int, on_a_host: int) -> float:
    """Seconds of a collective whose longer side has ``size`` bytes, by the quickest protocol."""
    rounds = 2 if kind is Kind.ALL_REDUCE else 1
    steps, between_hosts = rounds * (ranks - 1), rounds * (hosts - 1)
    within, across = ACHIEVED["nvlink"] * gpu.nvlink, ACHIEVED["network"] * gpu.network * on_a_host
    bandwidth = (within if hosts == 1 else min(within, across) if on_a_host > 1 else across) * 1e9
    sent = rounds * size * (ranks - 1) / ranks
    return min(
        (begin + (steps - between_hosts) * nvlink + between_hosts * network) * 1e-6 + sent / (part * bandwidth)
        for begin, nvlink, network, part in _PROTOCOLS
    )
