"""``step.recompiles()``: the programs that a step has compiled, each with the reason why no earlier one fitted."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

FIRST = "the first call"


@dataclass(frozen=True)
class Compilation:
    """A compiled program.

    ``reason``: the first difference between the call and the nearest program of before, as ``x: f32[4] -> f32[2]``.
    ``call``: the number of the call among those of the step, from 1. ``seconds``: of compiling. ``is_kept``: whether a
    later call may run it.
    """

    program: str
    reason: str
    call: int
    seconds: float
    is_kept: bool = True


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
        for each in self:
            kept = "yes" if each.is_kept else "no"
            cells = each.program, each.reason, f"{each.call:,}", f"{each.seconds:.1f}", kept
            table.add_row(*map(Text, cells))
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, color_system=None, width=shutil.get_terminal_size().columns).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
