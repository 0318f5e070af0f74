"""Run the programs of all ranks as a call does: once, or once for each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Shard

from passes import OutputKind, Program
from passes.ir.micro_batches import (
    ascend,
    empty_accumulators,
    new_accumulators,
    own_rows,
    without_checks_of_sums,
)
from passes.update.split_micro_batches import earlier_runs

from .bundle_lockstep import BundleRank, BundleRun, WatchOf
from .lockstep import Watch, run_in_lockstep
from .values import by_name


def run_programs(
    programs: Sequence[Program], inputs: Sequence[list[Any]], watch: Watch | None = None
) -> list[tuple[Any, ...]]:
    """``run_in_lockstep``, for each micro-batch where there are some; returns the outputs of the last one.

    Accumulators are made among ``inputs``. ``watch`` sees the value that a node has in all micro-batches together; of a
    program that is split in two it sees nothing.
    """
    if programs[0].stages is not None:
        stages = _SeenStages(programs)
        found = run_stages(programs, inputs, None if watch is None else stages.of)
        if watch is not None:
            stages.show(watch)
        return found
    micro = programs[0].micro_batches
    if micro is None and (watch is None or not programs[0].same_bits):
        return run_in_lockstep(programs, inputs, watch)
    if micro is None and watch is not None:
        parts = _Seen(side_by_side=True)
        results = run_in_lockstep(programs, inputs, parts)
        parts.show(watch)
        return results
    assert micro is not None
    for program, given in zip(programs, inputs, strict=True):
        for k, zeros in new_accumulators(program).items():
            given[k] = zeros
    if micro.spread is not None:
        return _run_spread(programs, inputs, watch)
    runs = [program.in_order() for program in programs]
    is_split = any(len(each.outputs) != len(programs[0].outputs) for each in programs[0].earlier.values())
    seen = None if watch is None or is_split else _Seen(micro.together > 1, _ranks_with_rows(programs[0]))
    rows: list[list[dict[str, Any]]] = [[] for _ in programs]
    for k in range(micro.count):
        now = [each[k] if k == micro.count - 1 else without_checks_of_sums(each[k]) for each in runs]
        taken = [micro.of_run(program.inputs, given, k) for program, given in zip(programs, inputs, strict=True)]
        returned = run_in_lockstep(now, taken, seen)
        for program, of_rank, outputs, before in zip(now, inputs, returned, rows, strict=True):
            _keep_accumulators(program, programs[0], of_rank, outputs)
            if k < micro.count - 1:
                ascend(programs[0], of_rank, k)
            named = {out.name: value for out, value in zip(program.outputs, outputs, strict=True)}
            before.append({name: named[name] for name in micro.joined})
    if seen is not None and watch is not None:
        seen.show(watch)
    ends = zip(programs, returned, rows, strict=True)
    return [tuple(micro.join(program.outputs, outputs, before[:-1])) for program, outputs, before in ends]


def _run_spread(programs: Sequence[Program], inputs: Sequence[list[Any]], watch: Watch | None) -> list[tuple[Any, ...]]:
    """Run parts that ranks divide."""
    inputs = [list(given) for given in inputs]
    micros = [program.micro_batches for program in programs if program.micro_batches is not None]
    seen = None if watch is None else _SeenSpread(len(programs), micros[0].together > 1)
    for k, declared in enumerate(programs[0].inputs):
        name = micros[0].whole.get(declared.name, declared.name)
        if name in micros[0].split:
            whole = torch.cat([given[k] for given in inputs], micros[0].split[name])
            for given in inputs:
                given[k] = whole
    lasts, rows = [each.in_order()[-1] for each in programs], [list[dict[str, Any]]() for _ in programs]
    firsts = [earlier_runs(each) for each in programs]
    orders = [micro.turns(each.earlier) for micro, each in zip(micros, programs, strict=True)]
    turns = list(zip(*orders, strict=True))
    for turn, at in enumerate(turns, start=1):
        now = lasts if turn == len(turns) else [own[role] for own, (role, _) in zip(firsts, at, strict=True)]
        ranks = list(zip(micros, now, inputs, (number for _, number in at), strict=True))
        if seen is not None:
            seen.works = [turn > len(micro.idle_runs) for micro in micros]
        taken = [micro.of_run(each.inputs, given, k) for micro, each, given, k in ranks]
        returned = run_in_lockstep(now, taken, seen)
        for (micro, each, given, k), program, outputs, of_rank in zip(ranks, programs, returned, rows, strict=True):
            if now is not lasts:
                _keep_accumulators(each, program, given, outputs)
            if turn <= len(micro.idle_runs):
                empty_accumulators(program, given)
                continue
            of_rank.append({out.name: value for out, value in zip(each.outputs, outputs, strict=True)})
            if now is not lasts:
                ascend(program, given, k)
    if seen is not None and watch is not None:
        seen.show(watch)
    joined = {
        name: torch.cat([each[name] for of_rank in rows for each in of_rank], dim)
        for name, dim in micros[0].joined.items()
    }
    return [
        tuple(
            own_rows(micro, joined[out.name], micro.joined[out.name]) if out.name in joined else value
            for out, value in zip(program.outputs, outputs, strict=True)
        )
        for micro, program, outputs in zip(micros, programs, returned, strict=True)
    ]


def run_stages(
    programs: Sequence[Program], inputs: Sequence[list[Any]], watch: WatchOf | None = None
) -> list[tuple[Any, ...]]:
    """Run the stages of all ranks together; returns what the whole programs would."""
    ranks, given = [], []
    for program, values in zip(programs, inputs, strict=True):
        named = by_name(program, values)
        named |= {program.inputs[k].name: zeros for k, zeros in new_accumulators(program).items()}
        micro = program.micro_batches
        assert micro is not None, "a pipeline runs micro-batches"
        named |= {name: named[whole] for whole, name in micro.whole.items() if name in micro.split and whole in named}
        written = {each.name for each in program.outputs if each.kind is OutputKind.UPDATE}
        state = {name: value for name, value in named.items() if name in written}
        coordinate = program.stages.coordinate_of(program)
        ranks.append(BundleRank(program.stages, coordinate, state))
        given.append({name: value for name, value in named.items() if name not in written})
    results = BundleRun(ranks).call("step", given, watch)
    found = [rank.state | returned for rank, returned in zip(ranks, results, strict=True)]
    return [
        tuple(None if out.role.is_carried else values[out.name] for out in program.outputs)
        for program, values in zip(programs, found, strict=True)
    ]


@dataclass
class _SeenStages:
    """Values that a pipeline's stages compute in a call, by program and the numbers of the ranks that run it."""

    programs: Sequence[Program]
    seen: dict[tuple[str, tuple[int, ...]], _Seen] = field(default_factory=dict)

    def of(self, role: str, numbers: Sequence[int]) -> Watch:
        """The watch that sees the next run of a program."""
        return self.seen.setdefault((role, tuple(numbers)), _Seen())

    def show(self, watch: Watch) -> None:
        """Show what each node computed in all runs together."""
        for (_, numbers), of_program in self.seen.items():
            of_program.show(partial(_on_all_ranks, watch, self.programs, numbers))


def _on_all_ranks(
    watch: Watch, programs: Sequence[Program], numbers: Sequence[int], nodes: Sequence[fx.Node], values: Sequence[Any]
) -> None:
    """Show what some ranks computed as if those of the other stages had it, too. ``numbers``: of these ranks."""
    places = [tuple(axis.coordinate for axis in each.mesh.axes if axis.name != each.stages.axis) for each in programs]
    at = {places[number]: k for k, number in enumerate(numbers)}
    watch([nodes[at[place]] for place in places], [values[at[place]] for place in places])


def _ranks_with_rows(program: Program) -> tuple[int, ...]:
    """For each mesh axis, among how many ranks it splits what micro-batches are cut from."""
    micro, found = program.micro_batches, [1] * len(program.mesh.axes)
    for declared in program.inputs:
        dim = micro.split.get(declared.name) if micro is not None else None
        for k, (axis, placement) in enumerate(zip(program.mesh.axes, declared.placement or (), strict=False)):
            found[k] = axis.size if dim is not None and placement.is_shard(dim) else found[k]
    return tuple(found)


def _keep_accumulators(program: Program, whole: Program, given: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Write what a functional program returns for its accumulators where the next run reads it."""
    position = whole.positions()
    for output, value in zip(program.outputs, outputs, strict=True):
        if output.role.is_carried:
            given[position[output.name]].copy_(value)


def _key(node: fx.Node, side_by_side: bool) -> Any:
    """Under what the values of a node are kept: those of all nodes that compute parts of one captured value together.

    A text for these, else a pair.
    """
    captured, is_part = node.meta.get("captured"), side_by_side and "in_time" in node.meta
    return captured if is_part and captured is not None else (node.name, captured)


def _in_time(node: fx.Node, runs: Sequence[Any]) -> Any:
    """Join a node's values of all runs: rows, one after the other, a sum, or what is the same in all."""
    along = node.meta.get("in_time")
    if along is None or not isinstance(runs[0], torch.Tensor):
        return runs[-1]
    return torch.cat(list(runs), along.dim) if isinstance(along, Shard) else sum(runs[1:], runs[0])


@dataclass
class _Seen:
    """The values of each node in all runs, by rank.

    Programs of other sizes have the same nodes: those of one name that compute one captured value. ``side_by_side``: a
    program has nodes for several parts, in order, which compute parts of one captured value. ``ranks``: by mesh axis,
    how many have rows of their own.
    """

    side_by_side: bool = False
    ranks: tuple[int, ...] = ()
    nodes: dict[Any, Sequence[fx.Node]] = field(default_factory=dict)
    values: dict[Any, list[Sequence[Any]]] = field(default_factory=dict)

    def __call__(self, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
        """Keep the values of a node in one run."""
        key = _key(nodes[0], self.side_by_side)
        self.nodes[key] = nodes
        self.values.setdefault(key, []).append(values)

    def show(self, watch: Watch) -> None:
        """Show what each node computed in all runs together; not of rows, or sums over rows, that some runs lack."""
        count = max((len(runs) for key, runs in self.values.items() if isinstance(key, tuple)), default=0)
        for key, runs in self.values.items():
            nodes = self.nodes[key]
            if not isinstance(key, tuple) or len(runs) == count or "in_time" not in nodes[0].meta:
                watch(nodes, [self._together(nodes[0], of_rank) for of_rank in zip(*runs, strict=True)])

    def _together(self, node: fx.Node, runs: Sequence[Any]) -> Any:
        along = node.meta.get("in_time")
        if not isinstance(along, Shard) or not isinstance(runs[0], torch.Tensor):
            return _in_time(node, runs)
        # A value that is gathered has the rows of each rank in a run; the whole batch has all rows of a rank together.
        placements = zip(self.ranks, node.meta.get("placement") or (), strict=False)
        count = math.prod(size for size, placement in placements if placement is None or not placement.is_shard())
        parts = [run.tensor_split(count, along.dim) for run in runs]
        return _in_time(node, [each[k] for k in range(count) for each in parts])


@dataclass
class _SeenSpread:
    """The values of each node where ranks divide the runs: the first ranks have the first ones.

    ``side_by_side`` as in ``_Seen``; ``works``: which ranks do not run idly now.
    """

    count: int
    side_by_side: bool
    works: Sequence[bool] = ()
    nodes: dict[Any, Sequence[fx.Node]] = field(default_factory=dict)
    values: dict[Any, list[list[Any]]] = field(default_factory=dict)

    def __call__(self, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
        """Keep the values of a node in one run."""
        key = _key(nodes[0], self.side_by_side)
        self.nodes[key] = nodes
        kept = self.values.setdefault(key, [[] for _ in range(self.count)])
        for of_rank, value, works in zip(kept, values, self.works, strict=True):
            of_rank += [value] if works else []

    def show(self, watch: Watch) -> None:
        """Show what each node computed in all runs together, as if each rank had run all; not what some runs lack."""
        runs = {key: [value for of_rank in of_ranks for value in of_rank] for key, of_ranks in self.values.items()}
        most = {kind: max((len(runs[key]) for key in runs if type(key) is kind), default=0) for kind in (str, tuple)}
        for key, values in runs.items():
            nodes = self.nodes[key]
            is_whole = len(values) == most[type(key)] or ("in_time" not in nodes[0].meta and values)
            if is_whole and nodes[0].op != "placeholder":  # of the batch each rank's input is all of it here
                watch(nodes, [_in_time(nodes[0], values)] * self.count)
