"""Why a call compiles anew, and ``step.recompiles()``: the programs that a step has compiled, each with its reason."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..call.call import Call
from .guards import Guards

FIRST = "the first call"


class Candidate(Protocol):
    """A program that a call might have run. ``uneven``: how many rows all ranks had, where they had unequal parts.

    ``left``: the reason that no later call runs it; empty while one may.
    """

    guards: Guards
    uneven: dict[str, int]
    left: str

    def is_of_this_world(self) -> bool:
        """Whether the process group is the one that it was compiled for."""

    def is_connected(self) -> bool:
        """Whether its ranks are still connected."""


def reason_to_compile(call: Call, last: Candidate | None, programs: Sequence[Candidate]) -> str:
    """The first difference between a call and the nearest program, in the user's words.

    The nearest is the one with the fewest differences among those that take such arguments, else the one last run.
    """
    if last is None:
        return FIRST
    if last.left:
        return last.left
    if not last.is_of_this_world():
        return "the process group is another one"
    if not last.is_connected():
        return "a call failed, and the ranks had to connect anew"
    own = [each for each in [last, *programs] if each.uneven == call.uneven]
    if not own:
        rows = ", ".join(f"{rows} of {name} in all" for name, rows in call.uneven.items())
        return f"ranks have unequal numbers of rows, {rows}" if rows else "ranks have equally many rows again"
    near = [each for each in own if each.is_of_this_world() and each.guards.leaves.hold(call.given)] or own[:1]
    return min((each.guards.differences(call.given, call.slots) for each in near), key=len)[0]


@dataclass(frozen=True)
class Compilation:
    """A compiled program.

    ``reason``: the first difference between the call and the nearest program of before, as ``x: f32[4] -> f32[2]``.
    ``call``: the number of the call among those of the step, from 1. ``seconds``: of compiling. ``is_kept``: whether a
    later call may run it. ``captured_on``: the rank that captured the step for all; None where each did, or none.
    """

    program: str
    reason: str
    call: int
    seconds: float
    is_kept: bool = True
    captured_on: int | None = None


@dataclass(frozen=True)
class Recompiles:
    """The programs of ``step`` in the order in which they were compiled; ``print`` and rich show them as a table."""

    step: str
    programs: tuple[Compilation, ...]

    def __len__(self) -> int:
        return len(self.programs)

    def __iter__(self) -> Iterator[Compilation]:
        return iter(self.programs)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return asdict(self)

    def __rich__(self) -> Table:
        title = f"{self.step}: {len(self)} program{'' if len(self) == 1 else 's'}"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
        for heading in ("program", "compiled because of", "call", "seconds", "kept"):
            is_number = heading in ("call", "seconds")
            table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
        if any(each.captured_on is not None for each in self):
            table.add_column("captured on")
        for each in self:
            kept = "yes" if each.is_kept else "no"
            rank = "each rank" if each.captured_on is None else f"rank {each.captured_on}"
            cells = each.program, each.reason, f"{each.call:,}", f"{each.seconds:.1f}", kept, rank
            table.add_row(*map(Text, cells[: len(table.columns)]))
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, color_system=None, width=shutil.get_terminal_size().columns).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
