"""Estimates beside published steps of others: step time, memory, the order of layouts, pairs that differ in one option.

    python -m benchmarks.anchors FILE.csv [--out PRED.csv] [--fit] [--noise]

FILE has a row for each run: its model by dims, layout, batch, GPUs, and seconds of a step. Two blocks of each model are
captured, partitioned and cleaned by this project on fake ranks; a plan estimates the rest. ``--out`` writes id, step_s
and memory_gib of each row, empty with the reason where it has no estimate. ``--fit`` fits the constants and says what
they are, and how well constants that were fitted on other models, and on other sources alone, do on the rest.
``--noise`` estimates nothing, and prints what a regression on the rows of each large sweep themselves gets.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spmd.planning.estimate import Estimate

from .errors import Errors, by_group
from .fit import estimated, fit, halves, held_out, sources, used
from .fit import write as write_constants
from .noise import regressed
from .rows import Row


def estimates(rows: Sequence[Row]) -> tuple[dict[str, Estimate], dict[str, str]]:
    """The estimate of each row, or the reason why there is none, by id."""
    found, reasons = dict[str, Estimate](), dict[str, str]()
    for row in rows:
        try:
            found[row.id] = row.estimate()
        except Exception as error:  # one row keeps no other one from its estimate
            reasons[row.id] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found, reasons


def table_of(errors: Sequence[Errors], title: str = "estimated and published steps") -> Table:
    """The errors of each group, in percent but for Spearman's coefficient."""
    shown = Table(title=title)
    headings = (
        "rows",
        "none",
        "median",
        "p90",
        "MAPE",
        "Spearman",
        "regret",
        "sweeps",
        "signs",
        "pairs",
        "memory",
        "of",
    )
    for heading in ("group", *headings):
        shown.add_column(heading, justify="left" if heading == "group" else "right")
    for each in errors:
        percents = [each.median, each.p90, each.mean]
        shown.add_row(
            each.name,
            *(str(each.count), str(each.unknown)),
            *map(_percent, percents),
            *("-" if each.spearman is None else f"{each.spearman:.2f}", _percent(each.regret), str(each.sweeps)),
            *(_percent(each.signs), str(each.pairs), _percent(each.memory), str(each.with_memory)),
        )
    return shown


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def write(path: Path, rows: Sequence[Row], found: Mapping[str, Estimate], reasons: Mapping[str, str]) -> None:
    """Write what was estimated of each row."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "step_s", "memory_gib", "reason"))
        for row in rows:
            each = found.get(row.id)
            figures = (f"{each.seconds:.6g}", f"{each.peak / 2**30:.4g}") if each else ("", "")
            writer.writerow((row.id, *figures, reasons.get(row.id, "")))


def main() -> None:
    """Estimate all rows, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the table of published runs")
    parser.add_argument("--out", type=Path, help="write the estimates to this file")
    parser.add_argument("--fit", action="store_true", help="fit the constants, and write them into the modules")
    parser.add_argument("--noise", action="store_true", help="print how far measured rows scatter, and end")
    parser.add_argument("--rounds", type=int, default=10, help="over all constants, to fit them (%(default)s)")
    options = parser.parse_args()
    with options.file.open() as file:
        rows = [Row(cells) for cells in csv.DictReader(file)]
    if options.noise:
        regression = regressed(rows)
        swept = [row for row in rows if row.id in regression]
        Console(width=160).print(table_of(by_group(swept, regression, {}), "a regression on the rows of each sweep"))
        return
    start = time.perf_counter()
    found, reasons = estimates(rows)
    seconds = (time.perf_counter() - start) / max(1, len(rows))
    memory = {id_: each.peak / 2**30 for id_, each in found.items()}
    Console(width=160).print(table_of(by_group(rows, {id_: each.seconds for id_, each in found.items()}, memory)))
    for reason in sorted(set(reasons.values())):
        print(f"{sum(each == reason for each in reasons.values())} rows without an estimate: {reason}")
    print(f"{seconds:.2f} s a row")
    if options.out:
        write(options.out, rows, found, reasons)
    if options.fit:
        known = [row for row in rows if row.id in found]
        for parts, title in ((halves(known), "the other half of the models"), (sources(known), "other sources")):
            Console(width=160).print(table_of(held_out(known, options.rounds, parts), f"fitted on {title}"))
        constants, software = fit(used(known), options.rounds)
        seconds = estimated(known, constants, software)
        Console(width=160).print(table_of(by_group(known, seconds, {}), "fitted on all models"))
        write_constants(constants, software, used(known), Path())


if __name__ == "__main__":
    main()
