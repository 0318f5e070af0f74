"""Levels of values that backward computes again, each with less memory and more time than the one before.

Greedy: of the values that wait for backward where most memory is in use, some are dropped, first what costs the least
time for its bytes, counting the ops that have to run again on its account and do not run again yet. Then the lives of
all values are computed anew, since what runs again needs memory, too. That is done for forward as a whole, and for it
cut into parts, where what crosses a cut is not dropped. Of all levels, those that need less memory than every faster
one are left.

Where a device has a link to host memory, a value may wait there instead. That takes no time as long as all that is
copied takes less than forward, and than backward, whichever is shorter: what would take longest to run again comes
first. What is copied beyond that is exposed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from ..ir.program import Program
from ..memory.forward_cuts import ForwardCuts
from ..memory.recomputable import Recomputable
from ..memory.recomputed_lives import Lives, RecomputedLives
from .node_costs import Cost, NodeCosts

_PARTS = 40  # of the peak, of which each level drops one
_ROUNDS = 64
_CUT_INTO = (1, 6, 24)


@dataclass(frozen=True)
class Level:
    """``ops``: whose results are dropped; ``offloaded``: those that wait in host memory. ``peak``: bytes without state.

    ``again``: the ops that run again. ``seconds``: of these, and of copies that nothing hides.
    """

    ops: tuple[str, ...]
    offloaded: tuple[str, ...]
    peak: int
    again: int
    seconds: float


class RecomputeLevels:
    """The levels of a partitioned program on its ``device``; ``link``: bytes a second to host memory, 0 without."""

    def __init__(self, program: Program, costs: NodeCosts, device: torch.device, link: float = 0.0) -> None:
        self._found = Recomputable(program)
        self._lives = RecomputedLives(program, device, self._found)
        self._seconds = cache(lambda node: _seconds(costs.of(node)))
        self._link, self._hidden = link, self._hidden_bytes(link)

    def all(self) -> list[Level]:
        """From the level where nothing runs again to that with the least peak."""
        cuts = ForwardCuts(self._lives)
        held = dict.fromkeys(map(cuts.crossed, _CUT_INTO))
        levels: list[Level] = []
        for level in sorted((each for ops in held for each in self._without(ops)), key=lambda each: each.seconds):
            if not levels or level.peak < levels[-1].peak:
                levels.append(level)
        return levels

    def of(self, ops: Collection[str], offloaded: Collection[str]) -> Level:
        """The level that drops these results, and lets those wait, which were chosen for another rank's sizes."""
        kept = self._found.kept
        return self._level([op for op in kept if op.name in ops], [op for op in kept if op.name in offloaded])

    def _without(self, held: frozenset[fx.Node]) -> Iterator[Level]:
        """Levels that drop more and more, but nothing of what is ``held``, until there is nothing to drop."""
        dropped, offloaded = dict[fx.Node, None](), dict[fx.Node, None]()
        for _ in range(_ROUNDS):
            lives = self._lives.without(dropped, offloaded)
            yield self._level(dropped, offloaded, lives)
            more = self._next(lives, dropped, offloaded, held)
            if not more:
                return
            for op, waits in more:
                (offloaded if waits else dropped)[op] = None

    def _next(
        self, lives: Lives, dropped: Collection[fx.Node], offloaded: Collection[fx.Node], held: frozenset[fx.Node]
    ) -> list[tuple[fx.Node, bool]]:
        """The values to drop next, and whether they wait in host memory: a part of the peak, if there are any."""
        again, moved, gone = set(lives.again), self._bytes(offloaded), {*dropped, *offloaded}
        priced = []
        for number, (op, size) in enumerate(lives.idle.items()):
            if size and op not in gone and op not in held:
                ops = self._found.ops_for(op, gone)
                seconds = sum(self._seconds(each) for each in ops if each not in again)
                waits = self._can_wait(op) and self._exposed(moved + size) - self._exposed(moved) < seconds
                priced.append(((-seconds if waits else seconds) / size, number, op, size, waits))
        found, freed = list[tuple[fx.Node, bool]](), 0
        for _, _, op, size, waits in sorted(priced, key=lambda entry: entry[:2]):
            if freed >= lives.peak / _PARTS:
                break
            found.append((op, waits))
            freed += size
        return found

    def _level(self, dropped: Collection[fx.Node], offloaded: Collection[fx.Node], lives: Lives | None = None) -> Level:
        lives = lives or self._lives.without(dropped, offloaded)
        seconds = sum(map(self._seconds, lives.again)) + self._exposed(self._bytes(offloaded))
        return Level(_names(dropped), _names(offloaded), lives.peak, len(lives.again), seconds)

    def _can_wait(self, op: fx.Node) -> bool:
        return bool(self._link) and isinstance(op.meta["val"], torch.Tensor)

    def _bytes(self, ops: Collection[fx.Node]) -> int:
        return sum(self._found.kept[op] for op in ops)

    def _exposed(self, moved: int) -> float:
        """Seconds of copies, to host memory and back, that compute is too short to hide."""
        return 2 * max(0.0, moved - self._hidden) / self._link if self._link else 0.0

    def _hidden_bytes(self, link: float) -> float:
        """The bytes that are copied in the shorter one of forward and backward."""
        if not link:
            return 0.0
        seconds = {False: 0.0, True: 0.0}
        for node in self._lives.nodes:
            if node.op == "call_function":
                seconds[node in self._lives.later] += self._seconds(node)
        return min(seconds.values()) * link


def _names(ops: Collection[fx.Node]) -> tuple[str, ...]:
    return tuple(op.name for op in ops)


def _seconds(cost: Cost) -> float:
    return cost.launch + cost.compute
