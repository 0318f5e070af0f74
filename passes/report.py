"""The report of a program: the collectives of one step, its estimated time, the memory it needs, the compile time."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from .analysis.collective_algorithms import BUILT_IN
from .analysis.collective_algorithms import Table as Costs
from .errors import did_you_mean
from .ir.bundle import Bundle
from .ir.collectives import Collective, Kind, input_bytes, moved
from .ir.printer import short_dtype
from .ir.program import Program
from .ir.roles import Holds
from .measured import IslandTime, MeasuredTime, OpTime, collectives_of_call
from .memory.bundle_memory import bundle_memory
from .memory.peak_memory import PlannedMemory, planned_memory
from .page.render import render
from .report_changes import changes
from .schedule.bundle_simulation import simulate_bundle
from .schedule.critical_path import PathPart, critical_path, in_all
from .schedule.estimate import estimate_runs
from .schedule.lanes import Lane, lanes_of
from .schedule.node_costs import device_of
from .schedule.simulation import Timeline, TransferTime, in_turn
from .trace import trace_events

_IDLE = "nothing to do"  # in the history of a program, of a pass
_MODULES = 4  # named in a row
_PATH = 16  # longest module path in the table
_OPS = 12  # whose times are shown
_NOTEBOOK_WIDTH = 120


@dataclass(frozen=True)
class Traffic:
    """Collectives of a step that agree in kind, axis, role, dtype, reason and implementation.

    ``bytes``: of one rank's local input. ``by``: the implementation, empty for the backend's own op. ``seconds``: how
    long they are estimated to take, and ``exposed``: by how much of that they make the step longer, mostly because of
    ``cause`` (a ``Cause``, empty if nothing is exposed). ``measured``: how long this rank was busy with them, or waited
    for them, in the calls that ``profile`` measured.
    """

    kind: str
    axis: str
    role: str
    dtype: str
    count: int
    bytes: int
    why: str
    by: str = ""
    seconds: float = 0.0
    exposed: float = 0.0
    measured: float = 0.0
    cause: str = ""


@dataclass(frozen=True)
class OneCollective(Traffic):
    """One collective. ``of``: the parameters, gradients or results that it serves; ``node``: its name in a dump.

    ``phase``, ``module``, ``line``: where in the step it belongs, where that is known. ``behind``: the modules whose
    compute is estimated to run meanwhile, with seconds.
    """

    node: str = ""
    of: tuple[str, ...] = ()
    phase: str = ""
    module: str = ""
    line: str = ""
    behind: tuple[tuple[str, float], ...] = ()

    def serves(self, name: str) -> bool:
        """Whether it is caused by this parameter, result or module, or by one inside of it."""
        return bool(name) and any(each == name or each.startswith(f"{name}.") for each in (*self.of, self.module))


@dataclass(frozen=True)
class EstimatedTime:
    """The time of one step on one rank, by simulation: ``exposed`` communication is what nothing hides.

    ``seconds``: of the step. ``compute`` and ``communication``: of all ops, and of all collectives.
    """

    seconds: float
    compute: float
    communication: float
    exposed: float

    @classmethod
    def of(cls, found: Timeline) -> EstimatedTime:
        """The sums of a simulated step."""
        return cls(found.seconds, found.compute, found.communication, found.exposed)


@dataclass(frozen=True)
class PassEffect:
    """A pass of the pipeline: what it did, and the nodes of the graph before and after it."""

    stage: str
    did: str
    nodes_before: int
    nodes_after: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """The communication of one step of a program; ``print`` and rich show it as tables.

    ``traffic``: the collectives in groups. ``every``: each collective by itself, in the order in which they start;
    ``caused_by`` has those of one parameter or module. ``estimated``: the time of a step, None on a device of which
    nothing is known; ``measured``: of the calls that the step's ``profile`` measured, None before.
    ``path``: the parts of its critical path. ``timeline``: that step, op by op; ``files``: makes those of a dump; both
    are no part of ``to_dict``. ``seconds``: the time of each stage of compiling, and ``passes``: what each pass did in
    it. ``reason``: why it was compiled, if that is known. ``notes``: messages for users, such as the ops that run
    replicated because they have no rule. ``memory``: by device, the planned peak of one rank, what it is made of, and
    what is largest then. ``islands``: what a compiler of kernels took, or left to aten; ``kernels``: their C++, no part
    of ``to_dict``. ``lanes``: of a pipeline, what each rank along its axis does, as estimated, and ``bubble``: the part
    of all ranks' time in which they wait.
    """

    name: str
    mesh: str
    traffic: tuple[Traffic, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    every: tuple[OneCollective, ...] = ()
    memory: dict[str, PlannedMemory] = field(default_factory=dict)
    estimated: EstimatedTime | None = None
    passes: tuple[PassEffect, ...] = ()
    measured: MeasuredTime | None = None
    reason: str = ""
    path: tuple[PathPart, ...] = ()
    islands: tuple[IslandTime, ...] = ()
    lanes: tuple[Lane, ...] = ()
    bubble: float = 0.0
    kernels: str = field(default="", repr=False, compare=False)
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    files: Callable[[], Mapping[str, str]] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        program: Program,
        seconds: Mapping[str, float] | None = None,
        notes: Sequence[str] = (),
        *,
        passes: Sequence[PassEffect] = (),
        costs: Costs = BUILT_IN,
        backend: str | None = None,
        reason: str = "",
        islands: Sequence[IslandTime] = (),
        kernels: str = "",
    ) -> Report:
        """The report of ``program``; every collective in it must be described, as ``check`` demands.

        ``costs`` estimate the time, for the axes' backends or for this one.
        """
        found = _simulated_stages(program, costs, backend) if program.stages else _simulated(program, costs, backend)
        return cls(
            program.name,
            str(program.mesh),
            _traffic(found.every),
            dict(seconds or {}),
            (*notes, *_of_micro_batches(program, found.memory)),
            tuple(program.history),
            found.every,
            found.memory,
            EstimatedTime.of(found.timeline) if found.timeline else None,
            tuple(passes),
            reason=reason,
            path=found.path,
            islands=tuple(islands),
            lanes=found.lanes,
            bubble=found.bubble,
            kernels=kernels,
            timeline=found.timeline,
        )

    def with_measured(self, program: Program, calls: Sequence[Mapping[str, float]]) -> Report:
        """This report of ``program`` with what calls of it took: seconds by the names of nodes, one entry a call."""
        bars = self.lanes[program.stages.coordinate_of(program)].bars if self.lanes else ()
        found, took = MeasuredTime.of(program, self.timeline, calls, bars), defaultdict[str, float](float)
        collectives = collectives_of_call(program)
        for name, collective in collectives.items():
            took[collective] += found.nodes.get(name, 0.0)
        started = dict.fromkeys(collectives.values())
        every = tuple(replace(one, measured=took[name]) for one, name in zip(self.every, started, strict=True))
        return replace(self, every=every, traffic=_traffic(every), measured=found)

    def count(self, kind: str) -> int:
        """The number of collectives of this kind in one step. Raises ``ValueError`` for an unknown kind."""
        return sum(row.count for row in self._rows(kind))

    def bytes(self, kind: str) -> int:
        """The bytes of these: one rank's local input, padding included. Raises ``ValueError`` for an unknown kind."""
        return sum(row.bytes for row in self._rows(kind))

    def caused_by(self, name: str) -> tuple[OneCollective, ...]:
        """The collectives of a parameter, result or module (``"model.blocks.0"``), with those inside of it."""
        return tuple(one for one in self.every if one.serves(name))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        plain = asdict(replace(self, timeline=None, files=None))
        return {key: value for key, value in plain.items() if key not in ("timeline", "files", "kernels")}

    def against(self, earlier: Report | Mapping[str, Any]) -> list[str]:
        """Sentences on what is other than in the report of an earlier run, or its ``to_dict``, and why.

        Times are compared as measured where both runs were (``step.profile``), else as estimated.
        """
        return changes(earlier.to_dict() if isinstance(earlier, Report) else earlier, self.to_dict())

    def scalars(self) -> dict[str, float]:
        """The numbers of a step by name, for TensorBoard, W&B and other trackers.

        ``count/all_reduce`` and ``bytes/all_reduce``: of each kind of collective. ``estimated/seconds``,
        ``estimated/compute``, ``estimated/communication`` and ``estimated/exposed``; after ``profile`` also
        ``measured/seconds`` and its parts. ``memory/cpu``: the planned peak of each device, in bytes.
        ``compile/capture``: the seconds of each stage of compiling.
        """
        kinds = dict.fromkeys(row.kind for row in self.traffic)
        found = {f"count/{kind}": float(self.count(kind)) for kind in kinds}
        found |= {f"bytes/{kind}": float(self.bytes(kind)) for kind in kinds}
        if self.estimated is not None:
            found |= {f"estimated/{part}": seconds for part, seconds in asdict(self.estimated).items()}
        if self.measured is not None:
            parts = ("seconds", "compute", "communication")
            found |= {f"measured/{part}": float(getattr(self.measured, part)) for part in parts}
        found |= {f"memory/{device}": float(memory.peak) for device, memory in self.memory.items()}
        return found | {f"compile/{stage}": seconds for stage, seconds in self.seconds.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Without ``files``, which need the compiled step: another process has none."""
        return {**vars(self), "files": None}

    def save(self, path: str | Path) -> None:
        """Write a page for a browser (``.html``), or what ``to_dict`` has (``.json``).

        The page of a compiled step also has its graphs, stage by stage; that of a report read from a file has none.
        Raises ``ValueError`` for files of another kind.
        """
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"expected a file that ends in .html or .json, got {path}")
        report = json.dumps(self.to_dict(), indent=2)
        files = self.files() if self.files is not None and path.suffix == ".html" else {}
        page = render({**files, "report.json": report}) if path.suffix == ".html" else report
        path.write_text(page, encoding="utf-8")

    def trace(self, path: str | Path) -> None:
        """Write the estimated step as a trace that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

        Raises ``ValueError`` where no time is estimated: on a device of which nothing is known, and for a report that
        was read from a file.
        """
        if self.timeline is None:
            raise ValueError(f"the report of {self.name} has no timeline: only that of a compiled step has one")
        events = trace_events(self.timeline, self.name, {one.node: one for one in self.every}, self.lanes)
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Report:
        """Read the output of ``to_dict``. Raises ``ValueError`` for anything else."""
        try:
            traffic = tuple(Traffic(**row) for row in given["traffic"])
            every = tuple(_read(one) for one in given["every"])
            memory = {device: PlannedMemory.from_dict(each) for device, each in given["memory"].items()}
            notes, history = tuple(given["notes"]), tuple(given["history"])
            estimated = EstimatedTime(**given["estimated"]) if given.get("estimated") else None
            measured = MeasuredTime.from_dict(given["measured"]) if given.get("measured") else None
            seconds, passes = given["seconds"], tuple(PassEffect(**each) for each in given.get("passes", ()))
            name, mesh, reason = given["name"], given["mesh"], given.get("reason", "")
            path = tuple(PathPart(**each) for each in given.get("path", ()))
            islands = tuple(IslandTime(**each) for each in given.get("islands", ()))
            lanes = tuple(Lane.from_dict(each) for each in given.get("lanes", ()))
            times = estimated, passes, measured, reason, path, islands, lanes, given.get("bubble", 0.0)
            return cls(name, mesh, traffic, seconds, notes, history, every, memory, *times)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no report of this version: {error!r}") from error

    def _rows(self, kind: str) -> list[Traffic]:
        if kind not in list(Kind):
            raise ValueError(
                f"expected a kind of collective, one of {', '.join(Kind)}, got {kind!r}{did_you_mean(kind, Kind)}"
            )
        return [row for row in self.traffic if row.kind == kind]

    def __str__(self) -> str:
        """The tables as plain text, as wide as the terminal."""
        text = io.StringIO()
        Console(file=text, color_system=None, width=shutil.get_terminal_size().columns).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """The tables, for a notebook."""
        console = Console(file=io.StringIO(), record=True, width=_NOTEBOOK_WIDTH)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre style='line-height: normal'>{code}</pre>")

    def __rich__(self) -> RenderableType:
        """The tables and the lines between them."""
        parts: list[RenderableType] = [self._collectives()]
        if self.estimated is not None or self.measured is not None:
            parts += _times(self.estimated, self.measured, self.traffic, self.path)
        if self.lanes:
            parts.append(_lanes(self.lanes, self.bubble))
        if self.measured is not None:
            parts.append(_ops(self.measured))
        if self.islands:
            parts.append(_islands(self.islands))
        parts += [_memory(device, memory) for device, memory in self.memory.items()]
        if self.seconds:
            times = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
            reason = f"; because of {self.reason}" if self.reason else ""
            parts.append(Text(f"seconds of compiling: {times}{reason}"))
        if self.passes:
            parts += _passes(self.passes)
        return Group(*parts, *(Text(f"note: {note}") for note in self.notes))

    def _collectives(self) -> RenderableType:
        title = f"{self.name} on {self.mesh}"
        if not self.traffic:
            return Text(f"{title}: one step communicates nothing")
        return _table(f"{title}: collectives of one step", self.traffic)


def _table(title: str, traffic: Sequence[Traffic]) -> Table:
    """The rows; the algorithm is a column only if some collective is not the backend's own op."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for heading in ("collective", "axis", "dtype"):
        table.add_column(heading, no_wrap=True)
    for heading in ("count", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    algorithms = [word for row in traffic for word in row.by.split()]
    if algorithms:
        table.add_column("algorithm", max_width=max(map(len, ["algorithm", *algorithms])))
    for row in traffic:
        table.add_row(*map(Text, _cells(row) if algorithms else _cells(row)[:-1]))
    return table


def _cells(row: Traffic) -> tuple[str, ...]:
    dtype = short_dtype(getattr(torch, row.dtype))
    return row.kind, row.axis, dtype, f"{row.count:,}", f"{row.bytes:,}", _shortened(row.why), row.by


def _times(
    estimated: EstimatedTime | None, measured: MeasuredTime | None, traffic: Sequence[Traffic], path: Sequence[PathPart]
) -> list[RenderableType]:
    """The time of a step, and of the collectives in it, as estimated and as measured."""
    lines: list[RenderableType] = []
    if estimated is not None:
        hidden = f"{_ms(estimated.exposed)} ms of {_ms(estimated.communication)} ms of communication exposed"
        lines.append(Text(f"one step, estimated: {_ms(estimated.seconds)} ms{f'; {hidden}' if traffic else ''}"))
    if path:
        listed = ", ".join(f"{_ms(part.seconds)} ms {part.where} {part.what}".replace("  ", " ") for part in path)
        lines.append(Text(f"its critical path: {listed}"))
    if measured is not None:
        parts = f"{_ms(measured.compute)} ms of compute, {_ms(measured.communication)} ms in collectives"
        lines.append(Text(f"one step, measured in {measured.calls} calls: {_ms(measured.seconds)} ms; {parts}"))
    headings = {"ms": "seconds", "exposed": "exposed"} if estimated is not None else {}
    headings |= {"measured": "measured"} if measured is not None else {}
    return [*lines, _times_of_collectives(traffic, headings)] if traffic else lines


def _lanes(lanes: Sequence[Lane], bubble: float) -> RenderableType:
    """A row for each rank of a pipeline."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("pipeline")
    for heading in ("runs, ms", "waits, ms", "bytes at the peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in lanes:
        table.add_row(*map(Text, (each.name, _ms(each.busy), _ms(each.idle), f"{each.peak:,}")))
    return Group(Text(f"its ranks wait in {bubble:.1%} of their time, by the estimate"), table)


def _times_of_collectives(traffic: Sequence[Traffic], headings: Mapping[str, str]) -> RenderableType:
    """``headings``: of columns, with the times that they show."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for heading in ("collective", "axis", "role"):
        table.add_column(heading, overflow="fold")
    for heading in ("count", *headings):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("because of" if "exposed" in headings else "", overflow="fold")
    for row in traffic:
        times = [_ms(getattr(row, key)) for key in headings.values()]
        table.add_row(*map(Text, (row.kind, row.axis, row.role, f"{row.count:,}", *times, row.cause)))
    return table


def _ops(measured: MeasuredTime) -> RenderableType:
    """The ops that took longest."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("op", overflow="fold")
    for heading in ("count", "estimated, ms", "measured, ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown, others = measured.ops[:_OPS], measured.ops[_OPS:]
    if others:
        sums = [sum(getattr(row, key) for row in others) for key in ("count", "estimated", "measured")]
        shown = (*shown, OpTime(f"{len(others)} others", *sums))
    for row in shown:
        table.add_row(*map(Text, (row.op, f"{row.count:,}", _ms(row.estimated), _ms(row.measured))))
    return table


def _islands(islands: Sequence[IslandTime]) -> RenderableType:
    """A row for each distinct island: ops, bytes that stay in registers and caches, and the time of a call."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("island", overflow="fold")
    for heading in ("ops", "calls", "bytes saved", "aten, us", "kernels, us"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in islands:
        times = [f"{seconds * 1e6:,.1f}" if not each.why else "" for seconds in (each.aten, each.kernels)]
        remark = each.why or ("" if each.is_taken else "left to aten")
        counts = [f"{count:,}" for count in (each.nodes, each.calls, each.bytes)]
        table.add_row(*map(Text, (each.name, *counts, *times, remark)))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _passes(passes: Sequence[PassEffect]) -> list[RenderableType]:
    """A table of the passes; those that found nothing to do are named below it."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("pass", no_wrap=True)
    table.add_column("did", overflow="fold")
    for heading in ("nodes before", "after", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    idle = [each.stage for each in passes if each.did == _IDLE]
    for each in passes:
        if each.did != _IDLE:
            counts = f"{each.nodes_before:,}", f"{each.nodes_after:,}"
            table.add_row(*map(Text, (each.stage, each.did, *counts, f"{each.seconds * 1e3:,.1f}")))
    return [table, *([Text(f"{_IDLE}: {', '.join(idle)}")] if idle else [])]


def _of_micro_batches(program: Program, memory: Mapping[str, PlannedMemory]) -> list[str]:
    """A sentence on what micro-batches save and cost, if there are some: activations are as many as rows."""
    micro = program.micro_batches
    if micro is None:
        return []
    once = sum(each.roles.get("activations", 0) for each in memory.values())
    inputs = zip(program.inputs, program.placeholders, strict=True)
    held = Counter[tuple[bool, Holds | None]]()
    for each, node in inputs:
        held[each.role.is_sum, each.role.holds] += node.meta["val"].nbytes if each.role.is_carried else 0
    runs = len(micro.runs)
    sums, gathered = held[True, Holds.GRADIENTS], held[False, Holds.GATHERED]
    whole = f", gathered once and kept in {gathered:,} bytes" if gathered else ""
    return [
        f"{micro.count} micro-batches: {once:,} bytes of activations at once, of some {once * runs:,} for all rows, at "
        f"the price of {sums:,} bytes of accumulators and of parameters that are read {runs} "
        f"times{whole}"
    ]


def _memory(device: str, memory: PlannedMemory) -> RenderableType:
    """The peak; side by side what it is made of, and what is largest then."""
    arena = f", {memory.arena:,} in an arena" if memory.arena else ""
    made_of, largest = _sizes("at the peak"), _sizes("largest then")
    for role, count in sorted({**memory.roles, "unused": memory.unused}.items(), key=lambda row: -row[1]):
        if count:
            made_of.add_row(Text(role), f"{count:,}")
    for value in memory.largest:
        largest.add_row(Text(value.name), f"{value.bytes:,}")
    both = Table.grid(padding=(0, 2))
    both.add_row(made_of, largest)
    return Group(Text(f"memory on {device}: {memory.peak:,} bytes at the peak{arena}"), both)


def _sizes(heading: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(heading, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    return table


@dataclass(frozen=True)
class _Simulated:
    """The collectives of a step, its memory, and its time where that can be estimated."""

    every: tuple[OneCollective, ...]
    memory: dict[str, PlannedMemory]
    timeline: Timeline | None
    path: tuple[PathPart, ...] = ()
    lanes: tuple[Lane, ...] = ()
    bubble: float = 0.0


def _simulated(program: Program, costs: Costs, backend: str | None) -> _Simulated:
    """One program, or its runs."""
    runs = estimate_runs(program, costs, backend=backend)
    every = tuple(one for each, timeline in runs for one in _every(each, timeline.transfers if timeline else ()))
    found = in_turn([timeline for _, timeline in runs if timeline is not None])
    path = in_all(critical_path(each, timeline) for each, timeline in runs if timeline is not None)
    return _Simulated(every, planned_memory(program), found, path)


def _simulated_stages(program: Program, costs: Costs, backend: str | None) -> _Simulated:
    """The programs of a pipeline, as the rank of ``program`` runs them."""
    bundle: Bundle = program.stages
    (call,) = bundle.calls
    own = bundle.coordinate_of(program)
    memory, device = bundle_memory(bundle, call, own), str(device_of(program))
    found = simulate_bundle(bundle, call, costs, backend=backend)
    if found is None:
        every = (one for role in bundle.order(call, own) for one in _every(bundle.programs[role], ()))
        return _Simulated(tuple(every), {device: memory.planned}, None)
    runs = found.runs[own]
    in_use = tuple((run.start, size) for run, size in zip(runs, memory.during, strict=True))
    return _Simulated(
        tuple(one for run in runs for one in _every(bundle.programs[run.role], run.transfers)),
        {device: memory.planned},
        replace(found.ranks[own], seconds=found.seconds, memory={device: in_use}),
        lanes=lanes_of(bundle, call, found),
        bubble=found.bubble,
    )


def _every(program: Program, transfers: Sequence[TransferTime]) -> Iterator[OneCollective]:
    """The collectives of one run of a program, in order."""
    times = {each.node: each for each in transfers}
    return (_one(node, times.get(node.name)) for node in program.collectives())


def _one(node: fx.Node, time: TransferTime | None) -> OneCollective:
    """The row of one collective."""
    described: Collective = node.meta["collective"]
    return OneCollective(
        kind=str(described.kind),
        axis=described.axis,
        role=str(described.role),
        dtype=_dtype(moved(node)[0].meta["val"]),
        count=1,
        bytes=input_bytes(node),
        why=described.why,
        by=described.by,
        seconds=time.seconds if time else 0.0,
        exposed=time.exposed if time else 0.0,
        node=node.name,
        of=tuple(described.of),
        phase=str(node.meta.get("phase") or ""),
        module=str(node.meta.get("module") or ""),
        line=str(node.meta.get("source") or ""),
        behind=time.behind if time else (),
        cause=str(time.cause or "") if time else "",
    )


def _read(one: Mapping[str, Any]) -> OneCollective:
    """A row that ``to_dict`` made into plain data."""
    behind = tuple((str(name), float(seconds)) for name, seconds in one.get("behind", ()))
    return OneCollective(**{**one, "of": tuple(one["of"]), "behind": behind})


def _traffic(every: Sequence[OneCollective]) -> tuple[Traffic, ...]:
    """One row for all collectives that agree in all but size and module, in order of first appearance."""
    groups: dict[tuple[str, ...], list[OneCollective]] = {}
    for one in every:
        key = (one.kind, one.axis, one.role, one.dtype, _without_module(one.why)[0], one.by)
        groups.setdefault(key, []).append(one)
    return tuple(_sum(each) for each in groups.values())


def _sum(every: Sequence[OneCollective]) -> Traffic:
    first, size, why = every[0], sum(one.bytes for one in every), _summary([one.why for one in every])
    seconds, exposed, measured = (sum(getattr(one, key) for one in every) for key in ("seconds", "exposed", "measured"))
    key = first.kind, first.axis, first.role, first.dtype
    causes = defaultdict[str, float](float)
    for one in every:
        causes[one.cause] += one.exposed
    cause = max(causes, key=causes.__getitem__)
    return Traffic(*key, len(every), size, why, first.by, seconds, exposed, measured, cause)


def _summary(reasons: Sequence[str]) -> str:
    """One text for reasons that differ in modules only; layers that differ in their number are one module."""
    if len(set(reasons)) == 1:
        return reasons[0]
    found = [_without_module(reason) for reason in reasons]
    modules = list(dict.fromkeys(re.sub(r"\d+", "*", module) for _, module in found if module))
    more = f" and {len(modules) - _MODULES} more" if len(modules) > _MODULES else ""
    return found[0][0] + (f" at {', '.join(modules[:_MODULES])}{more}" if modules else "")


def _without_module(reason: str) -> tuple[str, str]:
    """A reason and its module, without the end that a bucket added."""
    text, _, module = re.sub(r"( and others)?; \d+ in one$", "", reason).partition(" at ")
    return text, module


def _shortened(why: str) -> str:
    """Long module paths with their last names only: ``...attention.out`` for ``model.layers.*.attention.out``."""
    return re.sub(r"[\w*]+(\.[\w*]+)+", lambda path: _last_names(path[0]), why)


def _last_names(path: str) -> str:
    if len(path) <= _PATH:
        return path
    _, *names = path.split(".")
    while len(names) > 1 and len(".".join(names)) > _PATH - 3:
        del names[0]
    return "..." + ".".join(names)


def _dtype(val: torch.Tensor) -> str:
    return str(val.dtype).removeprefix("torch.")
