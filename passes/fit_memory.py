"""Fit a program into a budget of memory: gather parameters again, prefetch less, and compute values again in backward.

Of all ways that fit, the one with the least estimated time is taken. The ways are: what the program was partitioned
for; without prefetch; with all gathered parameters resharded; both. In each, as few values are computed again as it
takes, in the order of ``recompute_order``. Ranks may hold unequal parts, so every figure that decides is the largest
over ranks, and what to recompute first is the first rank's choice: all ranks make the same program.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import fx

from .base import Pass
from .communication.form_units import FormUnits
from .errors import MemoryBudgetError, PassError
from .ir.collectives import Kind
from .ir.program import Program, is_sharded
from .ir.roles import Role
from .memory.peak_memory import live_bytes, planned_memory
from .memory.recompute import Recompute
from .pipeline import backend_of, table_of
from .runner import run
from .schedule.estimate import estimate
from .schedule.node_costs import NodeCosts, device_of
from .schedule.rates import rates_of
from .schedule.recompute_order import recompute_order

_LEVELS = 24  # of recomputation, each with about as many ops more

AllGather = Callable[[str], list[str]]  # a rank's text to all ranks' texts


@dataclass(frozen=True)
class Fitted:
    """A partitioned program, the passes with which it fits, and a sentence on what that took."""

    program: Program
    pipeline: tuple[Pass, ...]
    note: str


def fit(program: Program, pipeline: Sequence[Pass], budget: int, all_gather: AllGather) -> Fitted:
    """Choose how a partitioned ``program`` fits into ``budget`` bytes per rank: all that a step holds on its device.

    Collective: all ranks call it. ``pipeline`` has ``FormUnits``, before which values are recomputed, or ``Recompute``
    where that shall stand. A program that fits as it is stays so. Raises ``MemoryBudgetError``, with the least budget
    that was found, if none fits, and ``PassError`` for a pipeline or a device on which nothing can be chosen.
    """
    search = _Search(program, tuple(pipeline), all_gather)
    own = search.ways[0]
    if search.made(own, 0).peak <= budget:
        return Fitted(program, tuple(pipeline), search.describe(own, 0, budget))
    best: _Choice | None = None
    for way in sorted(search.ways, key=lambda way: search.made(way, 0).seconds):
        if best is None or search.made(way, 0).seconds < search.made(*best).seconds:
            level = search.level(way, budget)
            if level is not None and (best is None or search.made(way, level).seconds < search.made(*best).seconds):
                best = way, level
    if best is None:
        raise MemoryBudgetError(_refusal(budget, search.least()))
    way, level = best
    return Fitted(way.of(program), search.pipeline(level), search.describe(way, level, budget))


@dataclass(frozen=True)
class _Way:
    """Which parameters are gathered again for backward, and how many units ahead."""

    reshard: frozenset[str]
    prefetch: tuple[int, int]

    def of(self, program: Program) -> Program:
        """The program with these settings."""
        return replace(program, reshard=self.reshard, prefetch=self.prefetch)


@dataclass(frozen=True)
class _Made:
    """What the passes made: bytes at the peak, and estimated seconds, on the rank that has the most."""

    peak: int
    seconds: float


_Choice = tuple[_Way, int]  # and the level of recomputation


class _Search:
    """What is known of the ways to run one program."""

    def __init__(self, program: Program, pipeline: tuple[Pass, ...], all_gather: AllGather) -> None:
        self._place, self._all_gather = _place_of(pipeline), all_gather
        self._passes, self._table = pipeline, table_of(pipeline)
        self._program = run(program, pipeline[: self._place], check=False)
        self.ways = _ways(self._program)
        order = recompute_order(self._program, self._costs())
        self._order: list[str] = json.loads(all_gather(json.dumps(order))[0])
        count = min(_LEVELS, len(self._order))
        self._counts = [0, *(round(len(self._order) * k / count) for k in range(1, count + 1))]
        self.made = cache(self._made)
        self._estimated_peak = cache(self._live)

    def pipeline(self, level: int) -> tuple[Pass, ...]:
        """All passes, with as much recomputation."""
        if level == 0:
            return self._passes
        stands = isinstance(self._passes[self._place], Recompute)
        return (*self._passes[: self._place], self._recompute(level), *self._passes[self._place + stands :])

    def level(self, way: _Way, budget: int) -> int | None:
        """The lowest level that fits; None if none does. What is planned may differ from what was estimated."""
        level, excess = 0, self.made(way, 0).peak - budget
        target = self._estimated_peak(0) - excess
        while excess > 0:
            levels = range(level + 1, self._leanest() + 1)
            if not levels:
                return None
            level = levels[bisect_left(levels[:-1], -target, key=lambda each: -self._estimated_peak(each))]
            excess = self.made(way, level).peak - budget
            target -= max(excess, 0)
        return level

    def least(self) -> int:
        """The least budget that was found to fit."""
        return min(self.made(way, self._leanest()).peak for way in self.ways)

    def describe(self, way: _Way, level: int, budget: int) -> str:
        """A sentence for the report."""
        made, plain = self.made(way, level), self.made(self.ways[0], 0)
        did = []
        if way.reshard != self.ways[0].reshard:
            did.append("all gathered parameters are gathered again for backward")
        if way.prefetch != self.ways[0].prefetch:
            did.append("no gather starts ahead")
        if level:
            count = self._counts[level]
            did.append(f"{count} of {len(self._order)} values that forward kept are computed again in backward")
        what = f"memory: {_mega(made.peak)} planned of {_mega(budget)}"
        if not did:
            return what
        slower = f"{made.seconds / plain.seconds - 1:.0%} more time by the estimate, {_mega(plain.peak)} without"
        return f"{what}; {', '.join(did)} ({slower})"

    def _leanest(self) -> int:
        """The level with the least estimated peak, if that falls up to there and rises from there on."""
        low, high = 0, len(self._counts) - 1
        while low < high:
            middle = (low + high) // 2
            if self._estimated_peak(middle) > self._estimated_peak(middle + 1):
                low = middle + 1
            else:
                high = middle
        return low

    def _live(self, level: int) -> int:
        """The most bytes in use before memory is planned."""
        program = run(self._program, [self._recompute(level)], check=False)
        (peak,) = self._agreed([max(size for _, size in live_bytes(program)[str(device_of(program))])])
        return int(peak)

    def _made(self, way: _Way, level: int) -> _Made:
        rest = self.pipeline(level)[self._place :]
        program = run(way.of(self._program), rest, check=False)
        device = str(device_of(program))
        peak = sum(plan.peak for space, plan in planned_memory(program).items() if space.partition(",")[0] == device)
        timeline = estimate(program, self._table, backend=backend_of(self._passes), with_memory=False)
        assert timeline is not None, "the rates of the device are known, or there would be no order"
        return _Made(*self._agreed([peak, timeline.seconds]))

    def _agreed(self, figures: list[Any]) -> list[Any]:
        """The largest of each figure over ranks."""
        texts = self._all_gather(json.dumps(figures))
        return [max(each) for each in zip(*map(json.loads, texts), strict=True)]

    def _recompute(self, level: int) -> Recompute:
        return Recompute(tuple(self._order[: self._counts[level]]))

    def _costs(self) -> NodeCosts:
        device = device_of(self._program)
        rates = rates_of(self._table, device, self._program.mesh)
        if rates is None:
            raise PassError(f"nothing is known of the speed of {device}, by which memory= chooses: calibrate it first")
        return NodeCosts(self._program, rates, self._table, backend=backend_of(self._passes))


def _place_of(pipeline: Sequence[Pass]) -> int:
    """Where values are recomputed."""
    places = [k for k, each in enumerate(pipeline) if isinstance(each, (Recompute, FormUnits))]
    if not places:
        raise PassError("memory= recomputes values before FormUnits, or at Recompute(): the pipeline has neither")
    return places[0]


def _ways(program: Program) -> list[_Way]:
    """How parameters may be gathered, the program's own way first."""
    own = _Way(program.reshard, program.prefetch)
    gathered = {name for node in program.collectives() if _gathers(node) for name in node.meta["collective"].of}
    sharded = {i.name for i in program.inputs if i.role is Role.PARAMETER and is_sharded(i.placement)}
    everything = own.reshard | gathered & sharded
    ways = [own]
    for reshard in (own.reshard, everything):
        for prefetch in (own.prefetch, (0, 0)) if reshard else ():
            if (way := _Way(reshard, prefetch)) not in ways:
                ways.append(way)
    return ways


def _gathers(node: fx.Node) -> bool:
    described = node.meta["collective"]
    return (described.role, described.kind) == (Role.PARAMETER, Kind.ALL_GATHER)


def _refusal(budget: int, least: int) -> str:
    return (
        f"expected memory= to be at least {_mega(least)} per rank, with which this step runs, got {_mega(budget)}: "
        "pass a smaller batch, or split state over more ranks"
    )


def _mega(size: int) -> str:
    return f"{math.ceil(size / 1e4) / 100:,.2f} MB"  # rounded up, so that it is enough
