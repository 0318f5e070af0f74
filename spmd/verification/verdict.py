"""``Verdict``: whether a compiled step computes what the plain step computes, and where it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Verdict:
    """The result of ``verify``: true if all agrees, else the first value that is wrong, as closely as it is known.

    ``what``: the result or state that a user would see wrong, after step ``after``. ``stage``: the first stage whose
    program is wrong, ``"partition"``, say, or a pass; ``node``: the first node in it that is; ``line``: the user's
    line it belongs to; ``placement``: how ranks hold it. ``expected``, ``actual``: both values there.
    ``beside``: what it was compared with, its captured program where the plain step computes something else.
    """

    step: str
    world: str
    steps: int
    compared: int
    what: str = ""
    says: str = ""
    after: int | None = None
    stage: str = ""
    node: str = ""
    line: str = ""
    placement: str = ""
    expected: Any = None
    actual: Any = None
    notes: tuple[str, ...] = ()
    beside: str = "the plain step"

    def __bool__(self) -> bool:
        return not self.says

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found |= {name: _plain(found[name]) for name in ("expected", "actual")}
        return {"agrees": bool(self), **found, "notes": list(self.notes)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        agrees = "agrees" if self else "differs"
        style = "green" if self else "red"
        yield Panel(self._body(), title=f"{self.step} {agrees}", title_align="left", border_style=style, expand=False)

    def _body(self) -> Table:
        rows = Table.grid(padding=(0, 2))
        rows.add_row("ranks", Text(f"{self.world}, simulated"))
        if self:
            rows.add_row("compared", Text(f"{self.compared} values after {self.steps} steps, with {self.beside}"))
        else:
            where = f", after step {self.after}" if self.after is not None else ""
            shown = {"value": f"{self.what}{where}", "stage": self.stage, "node": self.node, "line": self.line}
            shown |= {"placement": self.placement, "expected": str(self.expected), "actual": str(self.actual)}
            shown["why"] = self.says
            for name, text in shown.items():
                if text:
                    rows.add_row(name, Text(text))
        for note in self.notes:
            rows.add_row("note", Text(note))
        return rows

    def __str__(self) -> str:
        console = Console(width=110, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip()


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)
