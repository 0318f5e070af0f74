"""Which values backward computes again, level by level: each needs less memory and more time than the one before.

Greedy: of the values that wait for backward where most memory is in use, some are dropped, first what costs the least
time for its bytes, counting the ops that have to run again on its account and do not run again yet. Then the lives of
all values are computed anew, since what runs again needs memory, too. That is done for forward as a whole, and for it
cut into parts, where what crosses a cut is not dropped. Of all levels, those that need less memory than every faster
one are left.
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
    """``ops``: whose results are dropped. ``peak``: bytes without state. ``again``, ``seconds``: of what runs again."""

    ops: tuple[str, ...]
    peak: int
    again: int
    seconds: float


class RecomputeLevels:
    """The levels of a partitioned program on its ``device``."""

    def __init__(self, program: Program, costs: NodeCosts, device: torch.device) -> None:
        self._found = Recomputable(program)
        self._lives = RecomputedLives(program, device, self._found)
        self._seconds = cache(lambda node: _seconds(costs.of(node)))

    def all(self) -> list[Level]:
        """From the level where nothing runs again to that with the least peak."""
        cuts = ForwardCuts(self._lives)
        held = dict.fromkeys(map(cuts.crossed, _CUT_INTO))
        levels: list[Level] = []
        for level in sorted((each for ops in held for each in self._without(ops)), key=lambda each: each.seconds):
            if not levels or level.peak < levels[-1].peak:
                levels.append(level)
        return levels

    def of(self, ops: tuple[str, ...]) -> Level:
        """The level that drops the results of ``ops``, which were chosen for another rank's sizes."""
        names = set(ops)
        return self._level(ops, self._lives.without(op for op in self._found.kept if op.name in names))

    def _without(self, held: frozenset[fx.Node]) -> Iterator[Level]:
        """Levels that drop more and more, but nothing of what is ``held``, until there is nothing to drop."""
        dropped: dict[fx.Node, None] = {}
        for _ in range(_ROUNDS):
            lives = self._lives.without(dropped)
            yield self._level(tuple(op.name for op in dropped), lives)
            more = self._next(lives, dropped, held)
            if not more:
                return
            dropped |= dict.fromkeys(more)

    def _next(self, lives: Lives, dropped: Collection[fx.Node], held: frozenset[fx.Node]) -> list[fx.Node]:
        """What to drop besides: as much as makes a part of the peak, if there is anything."""
        again, freed = set(lives.again), 0
        priced = []
        for number, (op, size) in enumerate(lives.idle.items()):
            if size and op not in dropped and op not in held:
                ops = self._found.ops_for(op, dropped)
                priced.append((sum(self._seconds(each) for each in ops if each not in again) / size, number, op, size))
        found = []
        for _, _, op, size in sorted(priced, key=lambda entry: entry[:2]):
            if freed >= lives.peak / _PARTS:
                break
            found.append(op)
            freed += size
        return found

    def _level(self, ops: tuple[str, ...], lives: Lives) -> Level:
        return Level(ops, lives.peak, len(lives.again), sum(map(self._seconds, lives.again)))


def _seconds(cost: Cost) -> float:
    return cost.launch + cost.compute
