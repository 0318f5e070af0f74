"""In which order to give up what forward keeps for backward: first what costs the least time for its bytes.

Greedy: each step drops the op whose memory is had for the fewest seconds, counting the ops that have to run again on
its account and do not run again yet. Dropping one can make another dearer, if that needs it, so that costs are looked
at anew when their turn comes (lazy evaluation as in Minoux 1978; they can also fall, which is ignored).
"""

from __future__ import annotations

import heapq

from torch import fx

from ..ir.program import Program
from ..memory.recomputable import Recomputable
from .node_costs import NodeCosts


def recompute_order(program: Program, costs: NodeCosts) -> list[str]:
    """The names of the ops whose results ``program`` can do without keeping, cheapest first."""
    return _Order(program, costs).names()


class _Order:
    """What was dropped so far, and what runs again for it."""

    def __init__(self, program: Program, costs: NodeCosts) -> None:
        self._found, self._costs = Recomputable(program), costs
        self._dropped, self._again = set[fx.Node](), set[fx.Node]()

    def names(self) -> list[str]:
        """Drop one op after the other."""
        names, queue = [], [entry for number, op in enumerate(self._found.kept) if (entry := self._entry(number, op))]
        heapq.heapify(queue)
        while queue:
            price, number, op = heapq.heappop(queue)
            now = self._entry(number, op)
            if now is not None and now[0] > price:
                heapq.heappush(queue, now)
            elif now is not None:
                self._drop(op)
                names.append(op.name)
        return names

    def _entry(self, number: int, op: fx.Node) -> tuple[float, int, fx.Node] | None:
        """Seconds per byte, and ``number`` to decide between equals; None if the op cannot be dropped."""
        ops = self._found.ops_for(op, self._dropped)
        if ops is None:
            return None
        seconds = sum(self._seconds(each) for each in ops if each not in self._again)
        return seconds / self._found.kept[op], number, op

    def _drop(self, op: fx.Node) -> None:
        self._again.update(self._found.ops_for(op, self._dropped) or ())
        self._dropped.add(op)

    def _seconds(self, node: fx.Node) -> float:
        cost = self._costs.of(node)
        return cost.launch + cost.compute
