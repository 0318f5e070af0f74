"""Give compute another order where it would wait for collectives while there is other work to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..analysis.agreed_sizes import has_unequal_parts
from ..analysis.collective_algorithms import BUILT_IN, Table
from ..analysis.topological import arrange
from ..base import Pass
from ..communication.wait_late import WaitLate
from ..ir.infer_shapes import fill_vals
from ..ir.program import Program
from ..memory.canonicalize import Canonicalize
from ..memory.fold_layout_copies import FoldLayoutCopies
from ..memory.peak_memory import planned_memory
from ..memory.reduce_in_place import ReduceInPlace
from ..memory.reuse_memory import ReuseMemory
from ..memory.update_in_place import UpdateInPlace
from ..update.update_last import UpdateLast
from .hold_back import hold_back
from .node_costs import NodeCosts, device_of
from .rates import rates_of
from .simulation import simulate

_WORTH_IT = 0.01  # of the step: less is within what an estimate can be wrong by
_TRIES = 6  # to find what fits


@dataclass(frozen=True)
class Overlap(Pass):
    """Work that a collective does not need runs behind its start, where compute would wait for it (``hold_back.py``).

    The new order is taken if by the costs of ``table`` the step takes at least a hundredth less, and if the planned
    peak of memory is no higher on any device; where it is, less is held back, else all stays as it was. The order
    follows from the graph and from ``table`` alone, so it is the same on all ranks: nothing moves where ranks hold
    unequal parts, whose costs differ, or where ``table`` does not know the device. Collectives keep their order.
    Through shared memory nothing is hidden, since there the thread that computes moves the data, so nothing moves.
    """

    table: Table = BUILT_IN
    after: ClassVar[tuple[type[Pass], ...]] = (WaitLate, UpdateLast)

    def rewrite(self, program: Program) -> int:
        """Find another order, and compare; returns how many nodes are held back."""
        rates = rates_of(self.table, device_of(program), program.mesh, knows_gpu=False)
        if rates is None or not program.collectives() or has_unequal_parts(program):
            return 0
        costs = NodeCosts(program, rates, self.table)
        return _hold_back(program, costs, (1 - _WORTH_IT) * _seconds(program, costs))


def _hold_back(program: Program, costs: NodeCosts, worth: float) -> int:
    """Hold back what makes the step as fast as ``worth`` in the memory of now; returns how many nodes that are."""
    before, peaks, spare = list(program.graph.nodes), list[int](), 0
    for _ in range(_TRIES):
        order = hold_back(program, costs, spare)
        if order == before:
            break
        arrange(program.graph, order)
        if _seconds(program, costs) > worth:
            break
        if not peaks:
            arrange(program.graph, before)
            peaks = _peaks(program)
            arrange(program.graph, order)
        more = max(now - then for now, then in zip(_peaks(program), peaks, strict=True))
        if more <= 0:
            return _held_back(before, order)
        arrange(program.graph, before)
        spare = max(2 * spare, more)
    arrange(program.graph, before)
    return 0


def _seconds(program: Program, costs: NodeCosts) -> float:
    return simulate(program, costs, with_memory=False).seconds


def _peaks(program: Program) -> list[int]:
    """The planned peak on each device, in this order: values that are written over others take no memory."""
    planned = program.copy()
    for each in (UpdateInPlace(), ReduceInPlace(), Canonicalize(), FoldLayoutCopies(), ReuseMemory()):
        each.rewrite(planned)
        fill_vals(planned)
    return [memory.peak for _, memory in sorted(planned_memory(planned).items())]


def _held_back(before: Sequence[fx.Node], order: Sequence[fx.Node]) -> int:
    """The number of nodes that come after one that stood behind them."""
    position, last, held = {node: k for k, node in enumerate(before)}, -1, 0
    for node in order:
        held += position[node] < last
        last = max(last, position[node])
    return held
