"""The compute that ``calibrate`` measures: matrix products, copies, functions like ``exp``, launches.

They run on operands that were written a little earlier, as in a step: not those that the core just had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from passes.schedule.rates import COPIED, MATRIX

aten = torch.ops.aten

_SIZES = {"cpu": (64, 256), "cuda": (256, 4096)}  # rows and columns, beside the matrices that are always measured
_HALVES = {"cpu": (256,), "cuda": (1024, 4096)}  # the same of other dtypes
_DTYPES = (torch.bfloat16, torch.float64)
_COPIES = (1 << 16, 1 << 20)  # bytes, beside the copy that is always measured
_RECENT = 1 << 22  # bytes of all operands that take turns
_ELEMENTS = 1 << 18  # of which gelu is computed
_FLOPS = 1 << 27  # of products that are measured as one
_CALLS = 64  # ops and views that are measured as one


@dataclass(frozen=True)
class Measurement:
    """``run`` does ``work`` units of the rate called ``name`` in ``calls`` launches of ops."""

    name: str
    work: float
    calls: int
    run: Callable[[], object]


LAUNCHES = "launches"


def rates(done: Sequence[Measurement], seconds: Sequence[float]) -> dict[str, float]:
    """The rates by what each measurement took. The launch of an op costs extra in a step, so it is taken off here."""
    rates = {each.name: each.work / elapsed for each, elapsed in zip(done, seconds, strict=True)}
    launch = 1 / rates[LAUNCHES]
    for each, elapsed in zip(done, seconds, strict=True):
        if each.calls:
            rates[each.name] = each.work / max(elapsed - each.calls * launch, elapsed / 2)
    return rates


def measurements(device: str) -> Iterator[Measurement]:
    """Everything to measure on a kind of device, one after the other."""
    yield _products(torch.float32, MATRIX, device, "")
    for size in _SIZES[device]:
        yield _products(torch.float32, size, device, f" {size}")
    for dtype, size in itertools.product(_DTYPES, _HALVES[device]):
        yield _products(dtype, size, device, f" {size}")
    yield _copies(COPIED, device, "")
    for size in _COPIES:
        yield _copies(size, device, f" {size}")
    yield _gelus(device)
    yield from _launches(device)


def _products(dtype: torch.dtype, size: int, device: str, suffix: str) -> Measurement:
    flops = 2 * size**3
    count = max(1, _FLOPS // flops)
    distinct = max(1, min(count, _RECENT // (3 * dtype.itemsize * size**2)))
    operands = [[torch.rand(size, size, device=device).to(dtype) for _ in range(3)] for _ in range(distinct)]
    turns = [operands[k % distinct] for k in range(count)]

    def run() -> None:
        for a, b, c in turns:
            torch.mm(a, b, out=c)

    return Measurement(f"matmul {str(dtype).removeprefix('torch.')}{suffix}", flops * count, count, run)


def _copies(size: int, device: str, suffix: str) -> Measurement:
    count = max(1, _RECENT // (2 * size))
    pairs = [[torch.zeros(size // 4, device=device) for _ in range(2)] for _ in range(count)]

    def run() -> None:
        for source, target in pairs:
            target.copy_(source)

    return Measurement(f"memory{suffix}", 2 * size * count, count, run)


def _gelus(device: str) -> Measurement:
    pairs = [[torch.rand(_ELEMENTS, device=device) for _ in range(2)] for _ in range(_RECENT // (8 * _ELEMENTS))]

    def run() -> None:
        for x, y in pairs:
            aten.gelu.out(x, out=y)

    return Measurement("transcendental", _ELEMENTS * len(pairs), len(pairs), run)


def _launches(device: str) -> Iterator[Measurement]:
    """Calls of several ops in turn, as in a step: one op again and again is quicker."""
    few = [torch.ones(4, 4, device=device) for _ in range(_CALLS)]
    ops: tuple[Callable[..., torch.Tensor], ...] = (torch.add, torch.mm, torch.mul, torch.maximum)

    def launch() -> None:
        for k in range(0, _CALLS, len(ops)):
            for op, each in zip(ops, few[k : k + len(ops)], strict=True):
                op(each, each)

    def view() -> None:
        for each in few:
            each.view(16)

    yield Measurement(LAUNCHES, _CALLS, 0, launch)
    yield Measurement("views", _CALLS, 0, view)
