"""Fit a program into a budget of memory: gather parameters again, prefetch less, and compute values again in backward.

The candidates are all ways to gather parameters (what the program was partitioned for; in each run instead of once in a
call; without prefetch; with all gathered parameters resharded; both), each with every level of ``recompute_levels``, in
which values run again or, on a GPU, wait in host memory. They and their order, by estimated time, do not depend on the
budget, and the first one that fits is taken: more memory is never slower. Estimates decide which candidates the passes
are run on, so that most never are.

Ranks may hold unequal parts, so every figure that decides is the largest over ranks, and the levels are the first
rank's: all ranks make the same program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from .base import Pass
from .communication.form_units import FormUnits
from .default_passes import backend_of, table_of
from .errors import MemoryBudgetError, PassError
from .ir.bundle import Bundle
from .ir.collectives import Kind
from .ir.program import Program, is_sharded
from .ir.roles import Role
from .memory.binding_peak import Settings, describe_peak
from .memory.bundle_memory import bundle_memory
from .memory.peak_memory import planned_memory
from .memory.pieces import Pieces
from .memory.recompute import Recompute
from .memory.temporaries import most_with_temporaries
from .runner import run
from .schedule.estimate import estimate
from .schedule.node_costs import NodeCosts, device_of
from .schedule.rates import rates_of
from .schedule.recompute_levels import Level, RecomputeLevels
from .schedule.repeated_gathers import RepeatedGathers
from .schedule.streams import runs_on_streams
from .update.split_micro_batches import SplitMicroBatches

# Host memory: for a node in each graph that a step keeps (as captured, partitioned and run), 1,700 to 3,700 measured;
# for what Python keeps of compiling, once; and, of what ops allocate beside the arena, the part that they need while
# they run and that the allocator keeps.
_NODE_BYTES, _COMPILING, _GAPS = 4_000, 8_000_000, 0.25

AllGather = Callable[[str], list[str]]  # a rank's text to all ranks' texts


@dataclass(frozen=True)
class Fitted:
    """A partitioned program, the passes with which it fits, its bytes, and a sentence on what that took."""

    program: Program
    pipeline: tuple[Pass, ...]
    peak: int
    note: str


def fit(
    program: Program, pipeline: Sequence[Pass], budget: int, all_gather: AllGather, kept: Sequence[Program] = ()
) -> Fitted:
    """Choose how a partitioned ``program`` fits into ``budget`` bytes per rank: all that a step holds on its device.

    Collective: all ranks call it. ``pipeline`` has ``FormUnits``, before which values are recomputed, or ``Recompute``
    where that shall stand. ``kept``: programs that the step keeps besides. A program that fits as it is stays so.
    Raises ``MemoryBudgetError``, with the least budget of all candidates, if none fits, and ``PassError`` for a
    pipeline or a device on which nothing can be chosen.
    """
    search = _Search(program, tuple(pipeline), all_gather, sum(len(each.graph.nodes) for each in kept))
    if search.plain.peak <= budget:
        return Fitted(program, tuple(pipeline), search.plain.peak, search.describe(None, budget))
    chosen = search.fastest(budget)
    if chosen is None:
        raise MemoryBudgetError(search.refusal(budget))
    fitted = chosen.way.of(program), search.pipeline(chosen)
    return Fitted(*fitted, search.peak(chosen), search.describe(chosen, budget))


def check_state_fits(program: Program, budget: int, all_gather: AllGather, kept: Sequence[Program] = ()) -> None:
    """Raise ``MemoryBudgetError`` where a partitioned program's state alone is over ``budget``: no pass makes it less.

    On the host its graphs count, too, as far as they are made. Collective; ``kept``: as for ``fit``.
    """
    device, own = device_of(program), program.members().values()
    held, graphs = sum(dict(size for each in own for size in _state_bytes(each, device)).values()), 0
    if device.type == "cpu":
        graphs = _NODE_BYTES * sum(len(each.graph.nodes) for each in (program, program, *kept)) + _COMPILING
    most = max(map(int, all_gather(str(held + graphs))))
    if most > budget:
        is_whole = program.mesh.size > 1 and not settings_of(program).is_split
        split = 'set parallel_style="fully_shard"' if is_whole else "split state over more ranks"
        advice = f"{split}, or train a smaller model" if graphs < budget else "no setting makes the graphs fit"
        raise MemoryBudgetError(
            f"expected memory= to be at least {rounded_up(most)} per rank, which the step takes before a value is "
            f"computed ({rounded_up(held)} of state, {rounded_up(graphs)} for graphs and compiling), "
            f"got {rounded_down(budget)}: {advice}"
        )


def _state_bytes(program: Program, device: torch.device) -> Iterator[tuple[str, int]]:
    """The bytes of each parameter, buffer and tensor of an optimizer that a rank has on a device, by name."""
    state = {node: i.name for i, node in zip(program.inputs, program.placeholders, strict=True) if i.role.is_state}
    for piece in Pieces(program.graph).all:
        if piece.node in state and piece.space.device == device:
            yield state[piece.node], piece.size


def decide_gathers(program: Program, pipeline: Sequence[Pass], all_gather: AllGather) -> Program:
    """Choose whether the runs of a partitioned program gather parameters once in a call, if nothing else has.

    Once, if the call gets faster, in proportion, than its peak grows (``RepeatedGathers``). Collective. Never by a
    pipeline that does not split runs, as an empty one.
    """
    found = None
    if program.micro_batches is not None and program.stages is None:
        if not any(isinstance(each, SplitMicroBatches) for each in pipeline):
            note = ["passes= has no SplitMicroBatches, so that each micro-batch gathers parameters"]
            notes = [*program.notes, *(note if program.gathers_once else [])]
            return replace(program.with_facts(gathers_once=False), notes=notes)
        if program.gathers_once is None:
            found = RepeatedGathers.of(program, table_of(pipeline), backend_of(pipeline))
    if found is None:
        return program
    figures = [json.loads(text) for text in all_gather(json.dumps(astuple(found)))]
    return RepeatedGathers(*map(max, zip(*figures, strict=True))).decided(program)


def bytes_of_stages(
    program: Program, pipeline: Sequence[Pass], all_gather: AllGather, kept: Sequence[Program] = ()
) -> tuple[int, str, int]:
    """The bytes that a pipeline holds on its device after the passes, on the rank that needs the most; collective.

    With it a sentence on the peak there, and what graphs and compiling take of it.
    """
    done = run(program, pipeline, check=False)
    bundle: Bundle = done.stages
    (call,), device, own = bundle.calls, device_of(program), done.members().values()
    planned = bundle_memory(bundle, call, bundle.coordinate_of(program)).planned
    memory, beside = planned.peak + max(map(_bytes_beside, own)), 0
    if device.type == "cpu":
        graphs = [program, program, *program.stages.programs.values(), *own, *kept]
        beside = _NODE_BYTES * sum(len(each.graph.nodes) for each in graphs) + _COMPILING
    found = [memory + beside, describe_peak(planned, settings_of(program)), beside]
    most, peak, beside = max(map(json.loads, all_gather(json.dumps(found))), key=lambda each: each[0])
    return most, peak, beside


def _bytes_beside(program: Program) -> int:
    """Bytes beside planned memory: temporaries of ops while they run, and gaps that the allocator keeps."""
    planned = sum(each.allocated for each in planned_memory(program).values())
    return int(max(planned, most_with_temporaries(program, device_of(program))) * (1 + _GAPS)) - planned


def describe_fit(schedule: str, peak: int, budget: int) -> str:
    """The sentence for the report on a pipeline that fits."""
    return f'memory: {rounded_up(peak)} planned of {rounded_up(budget)}, with schedule="{schedule}"'


@dataclass(frozen=True)
class _Way:
    """A policy of gathers: parameters gathered again for backward, units ahead, and whether runs gather them once."""

    reshard: frozenset[str]
    prefetch: tuple[int, int]
    gathers_once: bool

    def of(self, program: Program) -> Program:
        """The program with these settings."""
        return program.with_facts(**vars(self))


@dataclass(frozen=True)
class _Made:
    """The result of the passes: bytes at the peak, and estimated seconds, on the rank that has the most.

    ``on_streams``: whether copies between host and device have streams of their own.
    """

    peak: int
    seconds: float
    on_streams: bool


@dataclass(frozen=True)
class _Candidate:
    """A way with a level of recomputation, and estimates of its peak and seconds."""

    way: _Way
    level: Level
    peak: int
    seconds: float


class _Search:
    """The candidates for one program, as far as they are known."""

    def __init__(self, program: Program, pipeline: tuple[Pass, ...], all_gather: AllGather, kept_nodes: int) -> None:
        self._kept_nodes = kept_nodes
        self._place, self._all_gather = _place_of(pipeline), all_gather
        self._given, self._passes, self._table = program, pipeline, table_of(pipeline)
        self._program = run(program, pipeline[: self._place], check=False)
        self._ways = _ways(self._program)
        self._costs = self._node_costs()
        self._made = cache(self._run)
        self.plain = self._made(self._ways[0], None)

    def fastest(self, budget: int) -> _Candidate | None:
        """The first candidate that fits; None if none does."""
        return next((each for each in self._candidates if each.peak <= budget and self.peak(each) <= budget), None)

    def refusal(self, budget: int) -> str:
        """The sentence on the least budget that any candidate fits into, and on its peak on the rank that has most."""
        least, way, recompute = self.plain.peak, self._ways[0], None
        for each in sorted(self._candidates, key=lambda each: each.peak):
            if each.peak < least and (peak := self.peak(each)) < least:
                least, way, recompute = peak, each.way, _recompute(each.level)
        program = self._rewritten(way, recompute)
        found = [_bytes(program), describe_program(program)]
        size, peak_of_most = max(map(json.loads, self._all_gather(json.dumps(found))), key=lambda each: each[0])
        return refusal(budget, least, peak_of_most, least - size if self._is_host else 0)

    def peak(self, candidate: _Candidate) -> int:
        """The bytes that a candidate counts as: what the passes make of it, or the estimate if that is more."""
        return max(candidate.peak, self._made(candidate.way, _recompute(candidate.level)).peak)

    def pipeline(self, chosen: _Candidate) -> tuple[Pass, ...]:
        """All passes, with its recomputation."""
        return self._with(_recompute(chosen.level))

    def describe(self, chosen: _Candidate | None, budget: int) -> str:
        """A sentence for the report."""
        peak = self.peak(chosen) if chosen else self.plain.peak
        what = f"memory: {rounded_up(peak)} planned of {rounded_up(budget)}"
        if chosen is None:
            return what
        did = []
        if chosen.way.gathers_once != self._ways[0].gathers_once:
            did.append("parameters are gathered in each micro-batch")
        if chosen.way.reshard != self._ways[0].reshard:
            did.append("all gathered parameters are gathered again for backward")
        if chosen.way.prefetch != self._ways[0].prefetch:
            did.append("no gather starts ahead")
        if count := len(chosen.level.ops):
            did.append(f"{count} values that forward kept are computed again in backward")
        if count := len(chosen.level.offloaded):
            did.append(f"{count} values that forward kept wait in host memory")
        slower = f"{chosen.seconds / self.plain.seconds - 1:.0%} more time by the estimate"
        return f"{what}; {', '.join(did)} ({slower}, {rounded_up(self.plain.peak)} without)"

    @cached_property
    def _candidates(self) -> list[_Candidate]:
        """All but the plain one, in the order in which they are tried."""
        levels, found = self._levels(), []
        for way in self._ways:
            made = self._made(way, None)
            for level in levels if way != self._ways[0] else levels[1:]:
                peak = made.peak - levels[0].peak + level.peak + self._node_bytes * level.again
                found.append(_Candidate(way, level, peak, max(made.seconds, self.plain.seconds) + level.seconds))
        return sorted(found, key=lambda each: (each.seconds, -each.peak))

    def _levels(self) -> list[Level]:
        """The first rank's levels, with the largest figures of all ranks."""
        link = self._costs.rates.host_link if self.plain.on_streams else 0.0
        found = RecomputeLevels(self._program, self._costs, device_of(self._program), link)
        own = found.all()
        chosen = [[each.ops, each.offloaded] for each in own]
        first = json.loads(self._all_gather(json.dumps(chosen))[0])
        if first != json.loads(json.dumps(chosen)):
            own = [found.of(*each) for each in first]
        peaks, seconds = (self._agreed([getattr(each, name) for each in own]) for name in ("peak", "seconds"))
        return [
            replace(each, peak=int(peak), seconds=took) for each, peak, took in zip(own, peaks, seconds, strict=True)
        ]

    def _with(self, recompute: Recompute | None) -> tuple[Pass, ...]:
        if recompute is None:
            return self._passes
        stands = isinstance(self._passes[self._place], Recompute)
        return (*self._passes[: self._place], recompute, *self._passes[self._place + stands :])

    def _run(self, way: _Way, recompute: Recompute | None) -> _Made:
        program = self._rewritten(way, recompute)
        nodes = 2 * len(self._given.graph.nodes) + len(program.graph.nodes) + self._kept_nodes
        peak = _bytes(program) + self._node_bytes * nodes + _COMPILING * self._is_host
        timeline = estimate(program, self._table, backend=backend_of(self._passes), with_memory=False)
        assert timeline is not None, "the rates of the device are known, or there would be no costs"
        peak, seconds = self._agreed([peak, timeline.seconds])
        return _Made(int(peak), seconds, runs_on_streams(program))

    def _rewritten(self, way: _Way, recompute: Recompute | None) -> Program:
        return run(way.of(self._program), self._with(recompute)[self._place :], check=False)

    @property
    def _is_host(self) -> bool:
        """Whether graphs lie in the memory that the budget is for."""
        return device_of(self._given).type == "cpu"

    @property
    def _node_bytes(self) -> int:
        return _NODE_BYTES if self._is_host else 0

    def _agreed(self, figures: list[Any]) -> list[Any]:
        """The largest of each figure over ranks."""
        texts = self._all_gather(json.dumps(figures))
        return [max(each) for each in zip(*map(json.loads, texts), strict=True)]

    def _node_costs(self) -> NodeCosts:
        device = device_of(self._program)
        rates = rates_of(self._table, device, self._program.mesh)
        if rates is None:
            raise PassError(f"nothing is known of the speed of {device}, by which memory= chooses: calibrate it first")
        return NodeCosts(self._program, rates, self._table, backend=backend_of(self._passes))


def _bytes(program: Program) -> int:
    """The bytes of a final program on its device, of those that a call runs the one that needs the most."""
    runs = {id(each.graph): each for each in program.in_order()}
    return max(_bytes_of_run(each, program) for each in runs.values())


def _bytes_of_run(program: Program, whole: Program) -> int:
    """The bytes by its plan, with what ops need and the allocator keeps beside it."""
    device = device_of(program)
    plans = [plan for space, plan in planned_memory(program, whole).items() if space.partition(",")[0] == str(device)]
    planned, allocated = sum(plan.peak for plan in plans), sum(plan.allocated for plan in plans)
    needed = max(allocated, most_with_temporaries(program, device))
    return planned - allocated + int(needed * (1 + _GAPS))


def _recompute(level: Level) -> Recompute | None:
    return Recompute(level.ops, level.offloaded) if level.ops or level.offloaded else None


def _place_of(pipeline: Sequence[Pass]) -> int:
    """The position in a pipeline at which values are recomputed. Raises ``PassError`` if it has none."""
    places = [k for k, each in enumerate(pipeline) if isinstance(each, (Recompute, FormUnits))]
    if not places:
        raise PassError("memory= recomputes values before FormUnits, or at Recompute(): the pipeline has neither")
    return places[0]


def _ways(program: Program) -> list[_Way]:
    """The policies by which parameters may be gathered, the program's own first."""
    own = _Way(program.reshard, program.prefetch, bool(program.gathers_once))
    gathered = {name for node in program.collectives() if _gathers(node) for name in node.meta["collective"].of}
    sharded = {i.name for i in program.inputs if i.role is Role.PARAMETER and is_sharded(i.placement)}
    everything = own.reshard | gathered & sharded
    ways = [own]
    for reshard in (own.reshard, everything):
        for prefetch in (own.prefetch, (0, 0)) if reshard or own.gathers_once else ():
            if (way := _Way(reshard, prefetch, gathers_once=False)) not in ways:
                ways.append(way)
    return ways


def _gathers(node: fx.Node) -> bool:
    described = node.meta["collective"]
    return (described.role, described.kind) == (Role.PARAMETER, Kind.ALL_GATHER)


def describe_program(program: Program) -> str:
    """The peak of a final program, of the run of a call that needs the most: where it is, and what to set next."""
    device = str(device_of(program))
    plans = [plan for space, plan in planned_memory(program).items() if space.partition(",")[0] == device]
    return describe_peak(max(plans, key=lambda plan: plan.peak), settings_of(program)) if plans else ""


def settings_of(program: Program) -> Settings:
    """The settings by which a partitioned program runs, for advice on its memory."""
    micro, inputs = program.micro_batches, list(zip(program.inputs, program.placeholders, strict=True))
    rows = {i.name: p.dim for i, _ in inputs for p in i.placement if i.role is Role.BATCH and isinstance(p, Shard)}
    rows = rows if micro is None else dict(micro.split)
    lengths = [node.meta["val"].shape[rows[declared.name]] for declared, node in inputs if declared.name in rows]
    flat = [part.input for declared, _ in inputs for part in declared.parts] + program.inputs
    sums = [each for each in flat if each.role.is_sum and each.shape]
    return Settings(
        parts=1 if micro is None else micro.count,
        rows=max(lengths, default=0),
        is_split=any(each.role is Role.PARAMETER and is_sharded(each.placement) for each in flat),
        adds_whole=any(not is_sharded(each.placement) for each in sums),
        ranks=program.mesh.size,
    )


def refusal(budget: int, least: int, peak: str, beside: int = 0) -> str:
    """The sentence for a budget below the ``least`` that a step runs with; ``beside``: of that, what is no value."""
    graphs = f" ({rounded_up(beside)} of it for graphs and compiling)" if beside > 0 else ""
    return (
        f"expected memory= to be at least {rounded_up(least)} per rank, with which this step runs{graphs}, "
        f"got {rounded_down(budget)}; {peak}"
    )


def rounded_up(size: int) -> str:
    """Bytes for people, as ``memory=`` takes them: rounded up, so that a budget of that text is enough."""
    return _rounded(size, math.ceil)


def rounded_down(size: int) -> str:
    """Bytes for people, of a budget that is too small: it does not read as the least that is enough."""
    return _rounded(size, math.floor)


def _rounded(size: int, whole: Callable[[float], int]) -> str:
    unit, name = (1e6, "MB") if size >= 1e6 else (1e3, "KB")
    return f"{whole(100 * size / unit) / 100:.2f} {name}"
