"""What a program communicates in one step, and how long it took to make: for people, for files, for tests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from ..runtime.arena import reserve
from .collectives import Collective, Kind, input_bytes, operands
from .program import Program

_PLACES = 4  # that a row names


@dataclass(frozen=True)
class Traffic:
    """Collectives of a step that agree in kind, axis, role, dtype, reason and in how they are performed.

    ``bytes``: of one rank's local input. ``by`` is empty where the op that means a collective performs it.
    """

    kind: str
    axis: str
    role: str
    dtype: str
    count: int
    bytes: int
    why: str
    by: str = ""


@dataclass(frozen=True)
class Report:
    """What one step of a program communicates; rich prints it.

    ``seconds`` says how long each stage of compiling took, ``notes`` what a user should know: for example, which ops
    run replicated because they have no rule. ``every`` has each collective by itself, in the order in which they start.
    ``memory`` has, by device, the bytes of the arena that the program computes in, which is kept between calls, and the
    bytes of what lives in it at once: no arena can be smaller.
    """

    name: str
    mesh: str
    traffic: tuple[Traffic, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    every: tuple[Traffic, ...] = ()
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, seconds: Mapping[str, float] | None = None, notes: Sequence[str] = ()) -> Report:
        """The report of ``program``; every collective in it must be described, as ``check`` demands."""
        mesh, history = str(program.mesh), tuple(program.history)
        every = tuple(_one(node) for node in program.collectives())
        traffic, memory = _traffic(every), _memory(program)
        return cls(program.name, mesh, traffic, dict(seconds or {}), tuple(notes), history, every, memory)

    def count(self, kind: str) -> int:
        """The number of collectives of this kind in one step. Raises ``ValueError`` for any other word."""
        return sum(row.count for row in self._rows(kind))

    def bytes(self, kind: str) -> int:
        """Their bytes: of one rank's local input, padding included. Raises ``ValueError`` for any other word."""
        return sum(row.bytes for row in self._rows(kind))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return asdict(self)

    def _rows(self, kind: str) -> list[Traffic]:
        if kind not in list(Kind):
            raise ValueError(f"expected a kind of collective, one of {', '.join(Kind)}, got {kind!r}")
        return [row for row in self.traffic if row.kind == kind]

    def __rich__(self) -> RenderableType:
        """What ``rich.print`` shows."""
        parts: list[RenderableType] = [self._table()]
        if self.seconds:
            times = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
            parts.append(Text(f"seconds by stage: {times}"))
        for device, (size, live) in self.memory.items():
            parts.append(Text(f"computes in an arena of {size:,} bytes on {device}; {live:,} live in it at once"))
        return Group(*parts, *(Text(f"note: {note}") for note in self.notes))

    def _table(self) -> RenderableType:
        title = f"{self.name} on {self.mesh}"
        if not self.traffic:
            return Text(f"{title}: one step communicates nothing")
        table = Table(title=f"{title}: what one step communicates", title_justify="left")
        for heading in ("collective", "axis", "what", "dtype"):
            table.add_column(heading, no_wrap=True)
        table.add_column("count", justify="right")
        table.add_column("bytes", justify="right")
        table.add_column("why")
        for row in self.traffic:
            why = Text(f"{row.why}; by {row.by}" if row.by else row.why)
            table.add_row(row.kind, row.axis, row.role, row.dtype, f"{row.count:,}", f"{row.bytes:,}", why)
        return table


def _memory(program: Program) -> dict[str, tuple[int, int]]:
    """The arenas, and the least that each could be."""
    arenas = program.graph.find_nodes(op="call_function", target=reserve)
    return {_name(*node.args): (node.args[0], node.meta["live_bytes"]) for node in arenas}


def _name(size: int, device: torch.device, shared: bool = False) -> str:
    return f"{device}, seen by other ranks" if shared else str(device)


def _one(node: fx.Node) -> Traffic:
    """What one collective moves."""
    said: Collective = node.meta["collective"]
    dtype = _dtype(operands(node)[0].meta["val"])
    return Traffic(str(said.kind), said.axis, str(said.role), dtype, 1, input_bytes(node), said.why, said.by)


def _traffic(every: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """One row for all collectives that agree in all but size and place, in order of first appearance."""
    groups: dict[tuple[str, ...], list[Traffic]] = {}
    for one in every:
        groups.setdefault((one.kind, one.axis, one.role, one.dtype, _apart(one.why)[0], one.by), []).append(one)
    return tuple(
        replace(each[0], count=len(each), bytes=sum(one.bytes for one in each), why=_summary([one.why for one in each]))
        for each in groups.values()
    )


def _summary(reasons: Sequence[str]) -> str:
    """One reason, and where it holds: layers that differ in their number alone are one place."""
    if len(set(reasons)) == 1:
        return reasons[0]
    apart = [_apart(reason) for reason in reasons]
    places = list(dict.fromkeys(re.sub(r"\d+", "*", place) for _, place in apart if place))
    shown = ", ".join(places[:_PLACES]) + (f" and {len(places) - _PLACES} more" if len(places) > _PLACES else "")
    return apart[0][0] + (f" at {shown}" if shown else "")


def _apart(reason: str) -> tuple[str, str]:
    """A reason and its place: what a pass put in front of it, how many it merged, is left out."""
    what, _, place = re.sub(r"^\d+ in one; ", "", reason).partition(" at ")
    return what, place


def _dtype(val: torch.Tensor) -> str:
    return str(val.dtype).removeprefix("torch.")
