"""What was found, as a table, and as one line for the notes of a release."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .figures import Figure
from .pairs import Sample
from .verdicts import Verdict, judge


@dataclass(frozen=True)
class Row:
    """A figure, its numbers by pair and the verdict."""

    figure: Figure
    a: list[float]
    b: list[float]
    verdict: Verdict


def rows(figures: Sequence[Figure], pairs: Sequence[dict[str, Sample]]) -> list[Row]:
    """The verdict on each figure."""
    found = []
    for figure in figures:
        a, b = ([figure.take(pair[name]) for pair in pairs] for name in ("A", "B"))
        found.append(Row(figure, a, b, judge(a, b)))
    return found


def table(title: str, found: Sequence[Row]) -> Table:
    """A row for each figure: medians, the ratio of B to A with its interval, and the answer."""
    shown = Table(title=title, title_justify="left")
    for heading in ("figure", "A", "B", "B / A", "interval", "B is"):
        shown.add_column(heading, justify="left" if heading in ("figure", "B is") else "right")
    for row in found:
        verdict, unit = row.verdict, row.figure.unit
        interval = f"{verdict.low:.3f} to {verdict.high:.3f}" if verdict.enough else ""
        style = "bold red" if verdict.slower else None
        a, b = (f"{statistics.median(each):.3g} {unit}" for each in (row.a, row.b))
        cells = (a, b, f"{verdict.ratio:.3f}", interval, verdict.answer)
        shown.add_row(row.figure.name, *cells, style=style)
    return shown


def line(a: str, b: str, found: Sequence[Row]) -> str:
    """One line of all ratios, with the answers that need a look."""
    parts = [f"{row.figure.name} {row.verdict.ratio:.2f}{_remark(row.verdict)}" for row in found]
    return f"Time and memory of {b} over {a}, {found[0].verdict.pairs} pairs: {'; '.join(parts)}."


def _remark(verdict: Verdict) -> str:
    interval = f"{verdict.low:.2f} to {verdict.high:.2f}"
    return "" if verdict.not_slower else f" ({interval}: {'slower' if verdict.slower else 'cannot tell'})"


def plain(found: Sequence[Row]) -> dict[str, Any]:
    """All rows as plain data, by figure, with the numbers of each pair to 5 digits."""
    return {
        row.figure.name: {
            "unit": row.figure.unit,
            "a": [float(f"{each:.5g}") for each in row.a],
            "b": [float(f"{each:.5g}") for each in row.b],
            "ratio": row.verdict.ratio,
            "interval": [row.verdict.low, row.verdict.high] if row.verdict.enough else None,
            "answer": row.verdict.answer,
        }
        for row in found
    }
