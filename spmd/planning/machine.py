"""Machines: seconds of a kernel, and of a collective, by published peaks and a few fitted constants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from passes import Kind
from passes.schedule.gpus import Gpu
from passes.schedule.op_work import OpClass

from .kernels import Kernel


@dataclass(frozen=True)
class Constants:
    """Fitted constants; ``benchmarks/anchors`` has the rows that they are fitted on.

    Fractions of the peaks: ``matmul`` of large products by generation of GPUs, ``attention`` of fused attention,
    ``memory``, ``nvlink``, ``network``, and ``message`` from one GPU to another. ``inner``: inner dim at which a
    product reaches half of that. ``tile``: how much of the last wave's idle time counts. ``float8``, ``float4``: what
    is left of their higher peaks. Seconds: ``kernel`` of the device for each launch, ``latency`` of a collective,
    ``hop`` and ``far_hop`` for each rank, or doubling of hosts, that it passes. ``spread``: what the network loses for
    each doubling of hosts. ``contention``: how much slower compute is beside collectives. ``knee``: the norm of device
    and host time that a step takes: where both are close, some parts wait for the one and some for the other.
    ``jitter``: how much longer a step takes for each doubling of hosts, which wait for the slowest.
    ``throttle``: how products follow the power of a GPU, as an exponent. ``reserved``: what the allocator holds beside
    the bytes in use, as a part of them.
    """

    matmul: Mapping[str, float]
    attention: Mapping[str, float]
    memory: float = 0.85
    nvlink: float = 0.75
    network: float = 0.8
    message: float = 0.4
    inner: float = 64.0
    tile: float = 0.5
    float8: float = 0.8
    float4: float = 0.6
    kernel: float = 3e-6
    latency: float = 15e-6
    hop: float = 2e-6
    far_hop: float = 10e-6
    spread: float = 0.05
    contention: float = 0.1
    knee: float = 4.0
    jitter: float = 0.0
    throttle: float = 0.5
    reserved: float = 0.05


@dataclass(frozen=True)
class Software:
    """Properties of a framework: its use of kernels and collectives.

    ``unfused``: the part of pointwise work that is not fused. ``launch``: seconds of the host for a kernel.
    ``exposed``: the part of tensor-parallel collectives that nothing hides. ``per_step``: seconds of an update
    beside the bytes that it moves. ``hides``: the part of the last micro-batch that hides the reduction of replicated
    gradients, and of messages between chunks; ``gathers_beside``: it hides the gathers of updated parameters, too.
    ``attention``: how much faster its kernel is than FlashAttention 2. ``balances``: stages have blocks by their time,
    the ends of the model counted. ``bucket``: bytes of replicated gradients that one collective reduces. ``adds``:
    gradients are added up by kernels of their own, not by the products that make them. ``tokens``: the part of the
    network that tokens to experts get, if not that of other messages.
    """

    unfused: float = 1.0
    launch: float = 6e-6
    exposed: float = 1.0
    per_step: float = 3e-3
    hides: float = 0.0
    gathers_beside: bool = False
    attention: float = 1.0
    balances: bool = False
    bucket: float = math.inf
    adds: bool = True
    tokens: float | None = None
    in_place: bool = True


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, ``per_host`` in each host.

    ``network``: GB/s of one GPU, if not the published figure. ``known``: seconds of sections that were estimated.
    """

    gpu: Gpu
    name: str
    per_host: int
    software: Software
    constants: Constants
    network: float | None = None
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def kernel(self, kernel: Kernel, rows: float, bits: int = 16, share: float = 1.0) -> float:
        """Seconds of the device. ``share``: of the bytes."""
        c, moved = self.constants, kernel.bytes.at(rows) * share / self.bandwidth
        flops = kernel.flops.at(rows)
        if kernel.kind is OpClass.ATTENTION:
            flops /= 2 if kernel.is_causal else 1
            return (
                max(moved, flops / (self.peak(kernel.dtype) * c.attention[self.generation] * self.software.attention))
                + c.kernel
            )
        if not flops:
            return moved + c.kernel
        seconds = flops / (self.peak(kernel.dtype, bits) * c.matmul[self.generation]) * self._shape(kernel, rows)
        casts = kernel.bytes.at(rows) * 0.75 / self.bandwidth if bits < 16 else 0.0  # two bytes read, one written
        return max(moved, seconds) + casts * self.software.unfused + c.kernel

    def _shape(self, kernel: Kernel, rows: float) -> float:
        """The factor by which a product is slower than a large one: short inner dim, last wave not full."""
        if len(kernel.dims) < 4:
            return 1.0
        batch, high, inner, wide = (max(1.0, each.at(rows)) for each in kernel.dims)
        waves = batch * math.ceil(high / 128) * math.ceil(wide / 128) / self.gpu.processors
        idle = math.ceil(waves) / waves - 1
        return (1 + self.constants.inner / inner) * (1 + idle * self.constants.tile)

    def peak(self, dtype: str, bits: int = 16) -> float:
        """FLOP/s of products of ``dtype``, or of fewer ``bits``."""
        c = self.constants
        higher = {8: 2 * c.float8, 4: self.gpu.float4 * c.float4}.get(bits, 1.0)
        return self.gpu.peak(dtype) * float(self.gpu.power**c.throttle) * higher

    @property
    def generation(self) -> str:
        """The letter of its generation: a GB200 has the GPUs of a B200."""
        return self.name.removeprefix("G")[0]

    @property
    def bandwidth(self) -> float:
        """Bytes a second of a GPU's memory."""
        return self.gpu.memory * 1e12 * self.constants.memory

    def collective(self, kind: Kind, size: float, ranks: int, stride: int = 1, bucket: float = math.inf) -> float:
        """Seconds of a collective of ``ranks`` that are ``stride`` apart; ``size``: bytes of its longer side.

        A ring passes through all ranks of a host, then by their shares of the network to the next host. Where there are
        more bytes than those of a ``bucket``, each of these is a collective.
        """
        if ranks <= 1 or not size:
            return 0.0
        c = self.constants
        on_host, hosts = self.hosts(ranks, stride)
        rounds = 2 if kind is Kind.ALL_REDUCE else 1
        seconds, rate = c.latency + rounds * (on_host - 1) * c.hop, self.gpu.nvlink * c.nvlink
        if hosts > 1:
            far = (self.network or self.gpu.network) * c.network * on_host / (1 + c.spread * math.log2(hosts))
            rate = min(rate, far) if on_host > 1 else far
            seconds += rounds * math.log2(hosts) * c.far_hop
        return seconds * max(1, math.ceil(size / bucket)) + rounds * size * (ranks - 1) / ranks / (rate * 1e9)

    def all_to_all(self, size: float, ranks: int, stride: int = 1, copies: int = 1) -> float:
        """Seconds to send a part of ``size`` bytes to each of ``ranks``, over its own card to those of other hosts.

        Of the ``copies`` of a token that go to another host, the network carries one.
        """
        if ranks <= 1 or not size:
            return 0.0
        c, (on_host, hosts) = self.constants, self.hosts(ranks, stride)
        near = size * (on_host - 1) / ranks / (self.gpu.nvlink * c.nvlink * 1e9)
        sent = size / copies * (hosts - 1) * (1 - (1 - 1 / hosts) ** copies)  # to hosts that have one of its experts
        far = sent / ((self.network or self.gpu.network) * (self.software.tokens or c.message) * 1e9)
        return c.latency + (on_host - 1) * c.hop + math.log2(hosts) * c.far_hop + max(near, far)

    def hosts(self, ranks: int, stride: int) -> tuple[int, int]:
        """The number of ``ranks`` on one host, and the number of hosts that they are on."""
        on_host = max(1, min(ranks, self.per_host // stride)) if stride < self.per_host else 1
        return on_host, math.ceil(ranks / on_host)

    def message(self, size: float, stride: int, gpus: int) -> float:
        """Seconds of a message to the rank ``stride`` further."""
        near = stride < self.per_host and gpus <= self.per_host
        c = self.constants
        rate = self.gpu.nvlink * c.nvlink if near else (self.network or self.gpu.network) * c.message
        return c.latency + size / (rate * 1e9)
