"""The collectives that ``calibrate`` measures: each kind by each algorithm, on operands of one size.

They run as in a compiled step: into results that are allocated before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from passes import Axis, Kind
from passes.analysis.collective_algorithms import MEASURED_MEMBERS, Algorithm
from passes.ir.collectives import OUT_VARIANTS, WAIT, c10d
from passes.runtime.coalesced_collectives import coalesced_all_gather, coalesced_reduce_scatter
from passes.runtime.collective_ops import part
from passes.runtime.message_collectives import exchange, gather_by_broadcast, gather_by_sending, swap
from passes.runtime.segments import allocate_segment
from passes.runtime.shared_memory_collectives import shared_all_gather, shared_all_reduce, shared_reduce_scatter

Run = Callable[[], object]


@dataclass(frozen=True)
class Operands:
    """Operands and results of one size, which all algorithms use in turn."""

    axis: Axis
    whole: torch.Tensor  # (ranks * length of a part,)
    other: torch.Tensor  # the same
    part: torch.Tensor  # (length of a part,)
    rows: torch.Tensor  # (ranks, length of a part)

    @classmethod
    def of(cls, axis: Axis, size: int, device: str) -> Operands:
        """Operands of ``size`` bytes, rounded down to equal parts."""
        length = max(1, size // 4 // axis.size)
        whole = torch.zeros(axis.size * length, device=device)
        return cls(axis, whole, torch.zeros_like(whole), whole[:length].clone(), whole.view(axis.size, -1).clone())

    def collective(self, kind: Kind, algorithm: Algorithm) -> Run:
        """A function that performs a collective of this kind by this algorithm, and waits for it."""
        if algorithm is Algorithm.NATIVE:
            return self._native(kind)
        if algorithm is Algorithm.SHARED:
            return self._shared(kind)
        if algorithm is Algorithm.COALESCED:
            return self._coalesced(kind)
        if kind is Kind.ALL_GATHER:
            return lambda: self._gather(algorithm)
        return self._reduce_scatter

    def _native(self, kind: Kind) -> Run:
        ranks, group = self.axis.size, self.axis.group
        if kind is Kind.ALL_GATHER:
            gather = OUT_VARIANTS[c10d.all_gather_into_tensor.default]
            return lambda: WAIT(gather(self.part, ranks, group, out=self.other))
        if kind is Kind.REDUCE_SCATTER:
            scatter = OUT_VARIANTS[c10d.reduce_scatter_tensor.default]
            return lambda: WAIT(scatter(self.whole, "sum", ranks, group, out=self.part))
        if kind is Kind.ALL_TO_ALL:
            swap_all, lengths = OUT_VARIANTS[c10d.all_to_all_single.default], [len(self.part)] * ranks
            return lambda: WAIT(swap_all(self.whole, lengths, lengths, group, out=self.other))
        assert kind is Kind.ALL_REDUCE, f"how to measure {kind} is not written"
        reduce = OUT_VARIANTS[c10d.all_reduce.default]
        return lambda: WAIT(reduce(self.whole, "sum", group, out=self.whole))

    def _shared(self, kind: Kind) -> Run:
        ranks, group, length = self.axis.size, self.axis.group, len(self.part)
        if kind is Kind.ALL_GATHER:
            part = _in_segment(self.part)
            return lambda: WAIT(shared_all_gather.out(part, [length], ranks, group, out=self.other))
        whole = _in_segment(self.whole)
        if kind is Kind.REDUCE_SCATTER:
            return lambda: WAIT(shared_reduce_scatter.out(whole, "sum", [length], ranks, group, out=self.part))
        scratch = _in_segment(self.part) if ranks > 2 else None
        return lambda: WAIT(shared_all_reduce.out(whole, scratch, "sum", group, out=self.other))

    def _coalesced(self, kind: Kind) -> Run:
        ranks, group, length = self.axis.size, self.axis.group, len(self.part)
        members = [part(length, MEASURED_MEMBERS, k) for k in range(MEASURED_MEMBERS)]
        if kind is Kind.ALL_GATHER:
            return lambda: WAIT(coalesced_all_gather.out(self.part, members, ranks, group, out=self.other))
        return lambda: WAIT(coalesced_reduce_scatter.out(self.whole, "sum", members, ranks, group, out=self.part))

    def _reduce_scatter(self) -> None:
        length = len(self.part)
        if self.axis.size == 2:
            own = self.whole[self.axis.coordinate * length :][:length]
            other = WAIT(swap.out(self.whole, length, self.axis.group, out=self.rows[0]))
            torch.add(own, other, out=self.part)
        else:
            rows = WAIT(exchange.out(self.whole, self.axis.size, length, self.axis.group, out=self.rows))
            torch.sum(rows, 0, out=self.part)

    def _gather(self, algorithm: Algorithm) -> None:
        gather = gather_by_broadcast if algorithm is Algorithm.GATHER_BY_BROADCAST else gather_by_sending
        WAIT(gather.out(self.part, len(self.other), self.axis.size, self.axis.group, out=self.other))


def _in_segment(like: torch.Tensor) -> torch.Tensor:
    """Memory of the shape and dtype of ``like`` that the other ranks of this host can read."""
    return allocate_segment(like.nbytes).view(like.dtype)
