"""Gathers of parameters that the runs of a call repeat: the time that they take, and the memory that they spare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..analysis.collective_algorithms import BUILT_IN, Table
from ..communication.gather_once import gathers
from ..ir.program import Program
from ..ir.roles import Phase
from ..memory.peak_memory import planned_memory
from .node_costs import NodeCosts, Transfer, device_of
from .rates import rates_of


@dataclass(frozen=True)
class RepeatedGathers:
    """Estimates for a call that gathers parameters in each run, and for one that does once: seconds, and bytes at most.

    Compute and gathers of one run overlap entirely. What is gathered once is whole as long as the call lasts; what each
    run gathers, and again for backward, is not counted at the peak.
    """

    seconds_each: float
    seconds_once: float
    bytes_each: float
    bytes_once: float

    @classmethod
    def of(cls, program: Program, table: Table = BUILT_IN, backend: str | None = None) -> RepeatedGathers | None:
        """Of a partitioned program; None if its runs gather nothing, or on a device of which nothing is known."""
        rates = rates_of(table, device_of(program), program.mesh)
        repeated = gathers(program)
        if program.micro_batches is None or rates is None or not repeated:
            return None
        costs = NodeCosts(program, rates, table, backend=backend)
        nodes = [node for node in program.graph.nodes if node.meta.get("phase") is not Phase.UPDATE]
        found = [costs.of(node) for node in nodes if node not in repeated]
        compute = sum(each.launch + each.compute for each in found)
        again = [node for node in repeated if program.reshard.intersection(node.meta["collective"].of)]
        first, second = ([costs.of(node).transfer for node in those] for those in (repeated, again))
        runs, whole = len(program.micro_batches.runs), sum(node.meta["val"].nbytes for node in again)
        most = sum(plan.peak for plan in planned_memory(program).values())
        once = _seconds(compute, first) + (runs - 1) * compute
        return cls(runs * _seconds(compute, [*first, *second]), once, most - whole, most)

    @property
    def are_worse(self) -> bool:
        """Whether they take more time, in proportion, than they spare memory."""
        return self.seconds_each * self.bytes_each > self.seconds_once * self.bytes_once

    def decided(self, program: Program) -> Program:
        """The program that gathers as it is better, with a sentence for the report."""
        times = [self.seconds_each, self.seconds_once]
        sizes = [self.bytes_each, self.bytes_once]
        how = ["in each micro-batch", "once in a step"]
        if self.are_worse:
            times, sizes, how = times[::-1], sizes[::-1], how[::-1]
        note = (
            f"to gather parameters {how[0]} is better by a first estimate: {times[0] * 1e3:,.2f} ms a step and "
            f"{sizes[0] / 1e6:,.2f} MB at the peak, instead of {times[1] * 1e3:,.2f} ms and {sizes[1] / 1e6:,.2f} MB "
            f"{how[1]}"
        )
        return replace(program.with_facts(gathers_once=self.are_worse), notes=[*program.notes, note])


def _seconds(compute: float, transfers: Sequence[Transfer | None]) -> float:
    """The time of one run: that of what takes longer."""
    sent = [each for each in transfers if each is not None]
    return max(compute + sum(each.cpu for each in sent), sum(each.seconds for each in sent))
