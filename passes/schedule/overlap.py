"""Give compute another order where it would wait for collectives while there is other work to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..analysis.costs import BUILT_IN, Table
from ..analysis.topological import arrange
from ..base import Pass
from ..communication.wait_late import WaitLate
from ..ir.program import Program, is_even, is_sharded
from ..memory.peak_memory import live_bytes
from ..update.update_last import UpdateLast
from .hold_back import hold_back
from .node_costs import NodeCosts, device_of
from .rates import rates_of
from .simulation import simulate

_WORTH_IT = 0.01  # of the step: less is within what an estimate can be wrong by


@dataclass(frozen=True)
class Overlap(Pass):
    """Work that a collective does not need runs behind its start, where compute would wait for it (``hold_back.py``).

    The new order is taken if by the costs of ``table`` the step takes at least a hundredth less, and if the peak of
    memory in use is no higher on any device; else all stays as it was. It follows from the graph and from ``table`` alone, so it is the same on all
    ranks: nothing moves where ranks hold unequal parts, whose costs differ, or where ``table`` does not know the
    device. Collectives keep their order. Through shared memory nothing is hidden, since there the thread that computes
    moves the data, so nothing moves.
    """

    table: Table = BUILT_IN
    after: ClassVar[tuple[type[Pass], ...]] = (WaitLate, UpdateLast)

    def rewrite(self, program: Program) -> int:
        """Find another order, and compare; returns how many nodes are held back."""
        rates = rates_of(self.table, device_of(program), program.mesh, knows_gpu=False)
        if rates is None or not program.collectives() or _has_unequal_parts(program):
            return 0
        costs, before = NodeCosts(program, rates, self.table), list(program.graph.nodes)
        order = hold_back(program, costs)
        if order == before:
            return 0
        seconds, *peaks = _figures(program, costs)
        arrange(program.graph, order)
        faster, *lower = _figures(program, costs)
        if faster > (1 - _WORTH_IT) * seconds or any(now > then for now, then in zip(lower, peaks, strict=True)):
            arrange(program.graph, before)
            return 0
        return _held_back(before, order)


def _figures(program: Program, costs: NodeCosts) -> list[float]:
    """Seconds of the step, and the most bytes in use on each device."""
    peaks = [max(size for _, size in changes) for _, changes in sorted(live_bytes(program).items())]
    return [simulate(program, costs, with_memory=False).seconds, *peaks]


def _has_unequal_parts(program: Program) -> bool:
    """Whether ranks hold unequal parts of some value, so that its size and cost are not the same on all."""
    inputs = [each for declared in program.inputs for each in ([p.input for p in declared.parts] or [declared])]
    even = all(is_even(each.shape, each.placement, program.mesh) for each in inputs if is_sharded(each.placement))
    return not even or any(node.meta.get("uneven") for node in program.graph.nodes)


def _held_back(before: Sequence[fx.Node], order: Sequence[fx.Node]) -> int:
    """The number of nodes that come after one that stood behind them."""
    position, last, held = {node: k for k, node in enumerate(before)}, -1, 0
    for node in order:
        held += position[node] < last
        last = max(last, position[node])
    return held
