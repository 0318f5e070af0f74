"""Run a recorded call again, all ranks in one process, up to the first value that is not finite.

From the state at the beginning of a stretch (``spmd/recorder.py``), the calls up to the wanted one run in lockstep,
which needs no network: a collective is computed from the operands of all ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from passes import Input, OutputKind, Program, SpmdError
from passes.analysis.aliases import is_view
from passes.ir.bundle import run_names
from passes.ir.collectives import is_collective, is_wait
from passes.ir.effects import mutates, written
from passes.ir.saved_program import load_program
from passes.ir.schemas import name_of
from passes.measured import collective_of
from passes.runtime.arena import reserve, view_at, whole

from .._torch import tree_flatten
from ..recorder import STATE, parts_of, recorded_calls
from .bundle_lockstep import WatchOf
from .lockstep import Watch
from .runs import run_programs, run_stages

_RECEIVED = "received:"


@dataclass(frozen=True)
class NotFinite:
    """A value with NaN or Inf, the first one on a ``rank``. ``text``: the node; ``count`` of ``of`` elements are such.

    ``kind``: "NaN" or "Inf"; ``operands``: what the node read, each with its range. ``run``: of a pipeline, the program
    and the micro-batch, ``forward.1 of 3``.
    """

    rank: int
    node: str
    text: str
    kind: str
    count: int
    of: int
    phase: str = ""
    module: str = ""
    line: str = ""
    operands: tuple[str, ...] = ()
    run: str = ""


@dataclass(frozen=True)
class Replay:
    """A call as it ran again on one ``rank`` of ``mesh``. ``since``: the call that it had the recorded state of.

    ``found``: the first value on that rank that is not finite, None if all are. ``origin``: where a collective brought
    it from another rank, the first one there. ``results``: numbers that the step returned, if it ran to its end.
    """

    step: str
    program: str
    mesh: str
    rank: int
    call: int
    since: int
    found: NotFinite | None = None
    origin: NotFinite | None = None
    results: dict[str, float] = field(default_factory=dict)


def replay(folder: Path, rank: int, call: int | None = None) -> Replay:
    """Run ``call`` again, by default the last one that all ranks recorded.

    Raises ``ValueError``, with what there is, where the record, the rank or the call is missing, ``SpmdError`` where
    the programs cannot run here.
    """
    ranks = _ranks(folder)
    if not 0 <= rank < len(ranks):
        raise ValueError(f"{folder} has a record of ranks 0 to {len(ranks) - 1}, none of rank {rank}")
    common = set.intersection(*(set(each.calls) for each in ranks))
    wanted = max(common, default=-1) if call is None else call
    first = max((k for k in common if k <= wanted and all(each.has_state(k) for each in ranks)), default=None)
    if wanted not in common or first is None:
        listed = f"{min(common)} to {max(common)}" if common else "none that all ranks have"
        raise ValueError(f"{folder} has no call {'' if call is None else call}: it has {listed}")
    watch = _Watch(rank)
    for number in range(first, wanted + 1):
        programs, inputs = zip(*(each.inputs(number) for each in ranks), strict=True)
        try:
            if programs[rank].stages is None:
                watch_of = partial(watch, _Run.of(programs[rank], range(len(ranks))))
                outputs = run_programs(programs, inputs, watch_of if number == wanted else None)
            else:
                outputs = run_stages(programs, inputs, watch.of_stages(programs) if number == wanted else None)
        except _FirstFound:
            break
        for each, given, returned in zip(ranks, inputs, outputs, strict=True):
            each.update(given, returned)
    facts = json.loads((ranks[0].folder / "record.json").read_text())["step"], programs[0].name, str(programs[0].mesh)
    results = {} if watch.found else _numbers(programs[rank], outputs[rank])
    return Replay(*facts, rank, wanted, first, watch.found, watch.origin(), results)


def _ranks(folder: Path) -> list[_Recorded]:
    """The records of all ranks of the mesh, in order."""
    found = sorted(folder.glob("rank-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not found:
        inside = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) if folder.is_dir() else "is no folder"
        raise ValueError(
            f"{folder} has no record, which step.record({str(folder)!r}) writes: it has {inside or 'nothing'}"
        )
    size = _Recorded(found[0]).size
    ranks = [_Recorded(each) for each in found[:size]]  # an earlier run on more ranks has left the others
    if len(ranks) != size:
        raise ValueError(
            f"a collective needs the operands of all {size} ranks of the mesh, and {folder} has those of "
            f"{', '.join(each.name for each in found)}: copy the folders of the other hosts into it"
        )
    return ranks


class _Recorded:
    """The record of one rank, and its state as calls run again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, recorded_calls(folder)
        self._programs: dict[str, Program] = {}
        self._state: dict[str, Any] = {}
        if not self.calls:
            raise ValueError(f"{folder} has no call: the step ended before its first one, or does not record")

    @property
    def size(self) -> int:
        """The number of ranks of the mesh."""
        return self._call(max(self.calls))[0].mesh.size

    def has_state(self, call: int) -> bool:
        """Whether the state before a call was recorded."""
        return self.calls[call] == min(self.calls[call].parent.glob("call-*.pt")) and self._state_file(call).exists()

    def inputs(self, call: int) -> tuple[Program, list[Any]]:
        """The program of a call and its inputs, in memory of their own."""
        program, given = self._call(call)
        if self.has_state(call):
            self._state = _loaded(self._state_file(call))
        return program, [self._value(declared, given) for declared in program.inputs]

    def update(self, inputs: Sequence[Any], returned: Sequence[Any]) -> None:
        """Take over the state that a call has left."""
        known = {declared.name: declared for declared in self._program.inputs}
        for declared, value in zip(self._program.inputs, inputs, strict=True):
            if declared.role.is_state:
                self._state |= parts_of(declared, value)
        for output, value in zip(self._program.outputs, returned, strict=True):
            if output.kind is not OutputKind.RESULT:
                self._state |= parts_of(known[output.name], value) if output.name in known else {output.name: value}

    def _call(self, call: int) -> tuple[Program, dict[str, Any]]:
        recorded = _loaded(self.calls[call])
        name = recorded["program"]
        if name not in self._programs:
            self._programs[name] = load_program(json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8")))
        self._program = self._programs[name]
        return self._program, recorded["inputs"]

    def _value(self, declared: Any, given: dict[str, Any]) -> Any:
        if not declared.role.is_state:
            return given[declared.name]
        if not declared.parts:
            return self._state[declared.name].clone()
        last = declared.parts[-1]
        found = [self._state[part.input.name] for part in declared.parts]
        flat = found[0].new_zeros(last.offset + last.numel)
        for part, value in zip(declared.parts, found, strict=True):
            flat.narrow(0, part.offset, part.numel).view(part.shape).copy_(value)
        return flat

    def _state_file(self, call: int) -> Path:
        return self.calls[call].parent / STATE


def _loaded(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found
    except Exception as error:  # of zip, pickle and torch, for a file that is cut short
        raise SpmdError(f"{path} is damaged, or no record: {error}") from error


def _numbers(program: Program, returned: Sequence[Any]) -> dict[str, float]:
    results = zip(program.outputs, returned, strict=True)
    return {
        output.name: float(value)
        for output, value in results
        if output.kind is OutputKind.RESULT and isinstance(value, Tensor) and value.numel() == 1
    }


class _FirstFound(Exception):
    """The rank that is looked at has a value that is not finite."""


@dataclass(frozen=True)
class _Run:
    """A program that the ranks ``numbers`` run. ``name``: of a pipeline, ``forward.1 of 3``."""

    inputs: Mapping[str, Input]
    numbers: Sequence[int]
    name: str = ""

    @classmethod
    def of(cls, program: Program, numbers: Sequence[int], name: str = "") -> _Run:
        """That of a program."""
        pairs = zip(program.placeholders, program.inputs, strict=True)
        return cls({node.name: declared for node, declared in pairs}, numbers, name)

    def brings(self, node: fx.Node) -> bool:
        """Whether a node is an input that an earlier program of the call, or run, has computed."""
        declared = self.inputs.get(node.name) if node.op == "placeholder" else None
        return declared is not None and (declared.role.is_of_channel or declared.role.is_carried)


class _Watch:
    """Looks for the first value that is not finite, on each rank. An Inf that was there, or is a literal, is none."""

    def __init__(self, rank: int) -> None:
        self._rank, self.first = rank, dict[int, NotFinite]()
        self._infinite: set[tuple[int, str]] = set()  # values that somebody may have made so on purpose, by rank
        self._ranges: dict[tuple[int, str], str] = {}

    @property
    def found(self) -> NotFinite | None:
        """The first one on the rank that is looked at."""
        return self.first.get(self._rank)

    def of_stages(self, programs: Sequence[Program]) -> WatchOf:
        """Make the watches of the runs of a pipeline's call, by program."""
        left = dict[str, list[str]]()
        for program in programs:
            order = program.stages.order("step", program.stages.coordinate_of(program))
            left |= {
                role: [name for name, each in zip(run_names(order), order, strict=True) if each == role]
                for role in order
            }

        def watch_of(role: str, numbers: Sequence[int]) -> Watch:
            program = programs[numbers[0]].stages.programs[role]
            return partial(self, _Run.of(program, numbers, left[role].pop(0)))

        return watch_of

    def origin(self) -> NotFinite | None:
        """The first one on another rank that sent it, if a collective brought it."""
        found = self.found
        others = [each for rank, each in self.first.items() if rank != self._rank]
        return others[0] if found is not None and found.text.startswith(_RECEIVED) and others else None

    def __call__(self, run: _Run, nodes: Sequence[fx.Node], values: Sequence[Any]) -> None:
        if nodes[0].op == "call_function" and (is_collective(nodes[0]) or nodes[0].target is reserve):
            return  # nothing is there yet
        for rank, node, value in zip(run.numbers, nodes, values, strict=True):
            if rank not in self.first:
                self._look(run, rank, node, value)
        if self._rank in self.first:
            raise _FirstFound

    def _look(self, run: _Run, rank: int, node: fx.Node, value: Any) -> None:
        tensors = [x for x in tree_flatten(value)[0] if isinstance(x, Tensor) and x.dtype.is_floating_point]
        self._ranges[rank, node.name] = ", ".join(map(_range, tensors))
        nan = sum(int(x.isnan().sum()) for x in tensors)
        infinite = sum(int(x.isinf().sum()) for x in tensors)
        if not (nan or infinite):
            self._infinite.discard((rank, node.name))
            return
        if run.brings(node) or _only_names_memory(node) or (not nan and self._is_meant(rank, node)):
            self._infinite.add((rank, node.name))
            return
        kind, count = ("NaN", nan) if nan else ("Inf", infinite)
        found = self._described(run, rank, node, kind, count)
        self.first[rank] = replace(found, of=sum(x.numel() for x in tensors), run=run.name)

    def _is_meant(self, rank: int, node: fx.Node) -> bool:
        """Whether an Inf among the operands, or a literal such as that of a mask, explains one in the result."""
        literals = [x for x in tree_flatten((node.args, node.kwargs))[0] if isinstance(x, float)]
        read = [each for each in node.all_input_nodes if each not in written(node)]
        from_operand = any((rank, each.name) in self._infinite for each in read)
        return from_operand or not all(map(math.isfinite, literals))

    def _described(self, run: _Run, rank: int, node: fx.Node, kind: str, count: int) -> NotFinite:
        text, started = f"{node.name} = {name_of(node.target)}({', '.join(map(str, node.args))})", collective_of(node)
        if node.op == "placeholder":
            declared = run.inputs[node.name]
            text = f"{node.name}: {declared.role} {declared.name}, as it came into the call"
        elif started is not None:
            text = f"{_RECEIVED} {node.name}, {started.meta['collective'].why or started.name}"
        elif is_wait(node):  # for a message that a program before has started
            text = f"{_RECEIVED} {node.name}, {run.inputs[node.all_input_nodes[0].name].name}"
        operands = tuple(
            f"{each.name}: {found}" for each in node.all_input_nodes if (found := self._ranges.get((rank, each.name)))
        )
        phase, module, line = (str(node.meta.get(key, "")) for key in ("phase", "module", "source"))
        return NotFinite(rank, node.name, text, kind, count, 0, phase, module, line, operands)


def _only_names_memory(node: fx.Node) -> bool:
    """Whether a node computes nothing: what lies in its memory was found elsewhere, or is yet to be written."""
    if node.op != "call_function" or mutates(node) or is_wait(node):
        return False
    return node.target in (view_at, whole) or is_view(node) or "empty" in name_of(node.target)


def _range(x: Tensor) -> str:
    """``f32[4, 8] from -1 to 3``, without what is not finite."""
    finite = x[x.isfinite()]
    shape = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    if not finite.numel():
        return f"{shape}, nothing finite"
    return f"{shape} from {float(finite.min()):.4g} to {float(finite.max()):.4g}"
