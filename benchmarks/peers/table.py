"""The results of one race as tables, and as plain data for JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from .race import Result
from .systems import FLOOR


def best_peer(results: Sequence[Result], family: str) -> float:
    """Seconds of the fastest peer of a family; infinite without one."""
    peers = [each for each in results if each.system.family == family and not each.system.ours]
    return min((each.median for each in peers), default=math.inf)


def speedup(result: Result, results: Sequence[Result]) -> float | None:
    """The speedup over the best peer of the same family; None without one."""
    peer = best_peer(results, result.system.family)
    return peer / result.median if math.isfinite(peer) and math.isfinite(result.median) else None


def table(title: str, results: Sequence[Result], *, counts_wire: bool) -> Table:
    """A table with a row for each system and a section for each family."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("system")
    for heading in ("ms/step", "min - max", "over floor", "speedup", "peak MB", "MB received", "first 4, s"):
        shown.add_column(heading, justify="right")
    floor = best_peer(results, FLOOR)
    for number, result in enumerate(results):
        if number and result.system.family != results[number - 1].system.family:
            shown.add_section()
        style = "bold" if result.system.ours else None
        shown.add_row(result.system.name, *_cells(result, results, floor, counts_wire), style=style)
    failures = [f"{result.system.name}: {result.failed}" for result in results if result.failed]
    shown.caption, shown.caption_justify = "\n".join(failures) or None, "left"
    return shown


def spending(results: Sequence[Result]) -> Table:
    """A table of the parts of a step's time, by medians: with one core per rank, they add up."""
    shown = Table(title="of which, in ms/step", title_justify="left")
    shown.add_column("system")
    for heading in ("compute", "copies", "backend CPU", "idle"):
        shown.add_column(heading, justify="right")
    for result in results:
        if not result.failed:
            parts = [f"{1e3 * each:.1f}" for each in _parts(result).values()]
            shown.add_row(result.system.name, *parts, style="bold" if result.system.ours else None)
    return shown


def exposed(results: Sequence[Result]) -> list[tuple[Result, Result, float]]:
    """Each system that ran with stand-ins, too, both results, and the seconds by which its step takes longer.

    The median over rounds of what both took in the same round, so that the machine was equally fast for both.
    """
    found = []
    for local in results:
        result = next((each for each in results if each.system.name == local.system.stands_for), None)
        if result is not None and not local.failed and not result.failed:
            pairs = zip(result.seconds, local.seconds, strict=True)
            found.append((result, local, statistics.median(each - other for each, other in pairs)))
    return found


def exposing(results: Sequence[Result]) -> Table | None:
    """A table of exposed communication; None if no system ran with stand-ins."""
    shown = Table(title="exposed communication, in ms/step", title_justify="left")
    shown.add_column("system")
    for heading in ("step", "with local stand-ins", "exposed", "of the step"):
        shown.add_column(heading, justify="right")
    for result, local, seconds in exposed(results):
        figures = (f"{1e3 * each:.1f}" for each in (result.median, local.median, seconds))
        shown.add_row(result.system.name, *figures, f"{seconds / result.median:.1%}")
    return shown if shown.row_count else None


def _parts(result: Result) -> dict[str, float]:
    """Seconds per step. Time that no thread of the process uses is idle."""
    transport, others = statistics.median(result.transport), statistics.median(result.others)
    idle = max(0.0, result.median - transport - others)
    return {"compute": others - result.copies, "copies": result.copies, "transport": transport, "idle": idle}


def _cells(result: Result, results: Sequence[Result], floor: float, counts_wire: bool) -> list[str]:
    if result.failed:
        return ["see below", *[""] * 6]
    over_peer = speedup(result, results)
    return [
        f"{1e3 * result.median:.1f}",
        f"{1e3 * min(result.seconds):.1f} - {1e3 * max(result.seconds):.1f}",
        f"{1e3 * (result.median - floor):+.1f}" if math.isfinite(floor) else "",
        f"{over_peer:.2f}x" if over_peer and result.system.family != FLOOR else "",
        f"{result.peak / 1e6:.1f}",
        f"{result.received / 1e6:.2f}" if counts_wire else "",
        f"{result.first:.1f}",
    ]


def plain(results: Sequence[Result]) -> list[dict[str, Any]]:
    """All figures, as plain data."""
    longer = {result.system.name: seconds for result, _, seconds in exposed(results)}
    return [
        {
            "system": each.system.name,
            "family": each.system.family,
            "failed": each.failed,
            "median": each.median if math.isfinite(each.median) else None,
            "of_best_peer": speedup(each, results),
            "seconds": each.seconds,
            "peak_bytes": each.peak,
            "received_bytes": each.received,
            "first_seconds": each.first,
            "parts": {} if each.failed else _parts(each),
            "losses": each.losses,
            "exposed": longer.get(each.system.name),
        }
        for each in results
    ]
