"""Train every architecture of the zoo, and print a table: ``python -m tests.models [names ...] [--help]``.

Each is trained by SGD with momentum on two gloo ranks, each with rows of its own, and in one process on the whole
batch; models of text also with a split sequence, in micro-batches and in two stages, and mixtures with split experts.
A line of the table: how many nodes one rank's program has, what it communicates, how long one program takes to compile,
and the largest difference of any number, or what is wrong in a line; in parts, with the mask of the batch and without
it. Exits with 1 if something is. The table in ``docs/models.md`` has the same, without
the seconds: a run of all architectures rewrites it, one of some with a role their cells in its column; with
``--backend inductor``, which takes all islands, it stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

from rich.console import Console
from rich.table import Table

from tests.harness.pool import RankError, Ranks

from . import text
from .catalog import ENTRIES
from .examine import Finding, Role, Style, examine, training_in
from .parts import InParts, Parts, in_parts
from .zoo import Entry

STYLES: tuple[Style, ...] = get_args(Style)
ROLES: tuple[Role, ...] = get_args(Role)
PARTS: tuple[Parts, ...] = get_args(Parts)
COLUMNS = (*ROLES, *PARTS)
HEADINGS = ("architecture", "kind", "style", "nodes", "collectives", "seconds", "agrees")
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
TABLE = re.compile(r"(?<=<!-- models: begin -->\n).*(?=<!-- models: end -->)", re.DOTALL)


def main() -> int:
    """Parse, train, print."""
    arguments = _arguments()
    chosen = [entry for entry in ENTRIES if not arguments.names or entry.name in arguments.names]
    unknown = set(arguments.names) - {entry.name for entry in ENTRIES}
    if unknown:
        sys.exit(f"no architecture is called {', '.join(sorted(unknown))}; there are {_listed()}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["TESTS_BACKEND"] = arguments.backend  # which the ranks read when they start
    ranks, console, lines = Ranks(), Console(stderr=True), []
    try:
        for line in _lines(
            ranks, chosen, [arguments.style] if arguments.style else (*STYLES, *COLUMNS), arguments.steps
        ):
            console.print("  ".join(line), markup=False, highlight=False)
            lines.append(line)
    finally:
        ranks.close()
    Console(width=None if sys.stdout.isatty() else 160).print(_table(lines))
    if arguments.backend == "aten":
        document = DOCUMENT.read_text()
        DOCUMENT.write_text(TABLE.sub(lambda table: _markdown(lines, table[0]), document))
    wrong = [line for line in lines if not line[-1].startswith("yes")]
    print(f"{len(lines) - len(wrong)} of {len(lines)} agree")
    return bool(wrong)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"all, if none is given; there are {_listed()}")
    parser.add_argument("--style", choices=(*STYLES, *COLUMNS), help="or role of the axis, or parts; all by default")
    parser.add_argument("--backend", choices=("aten", "inductor"), default="aten", help="of the compiled steps")
    parser.add_argument("--steps", type=int, default=4, help="of training; 4 by default")
    return parser.parse_args()


def _listed() -> str:
    return ", ".join(f'"{entry.name}"' if " " in entry.name else entry.name for entry in ENTRIES)


def _has(entry: Entry, style: Style | Role | Parts) -> bool:
    """Whether an architecture is trained so: not without sequences, or experts."""
    of_text = style == "sequence" or style in PARTS
    return entry in text.ENTRIES if of_text else style != "experts" or entry.kind == "mixture of experts"


def _lines(
    ranks: Ranks, entries: list[Entry], styles: Sequence[Style | Role | Parts], steps: int
) -> Iterator[tuple[str, ...]]:
    """One line of the table at a time."""
    for entry in entries:
        for style in (each for each in styles if _has(entry, each)):
            if style in PARTS:
                found = in_parts(InParts(entry, parts=style))
                yield (entry.name, entry.kind, style, "", "", "", found)
                continue
            on_ranks = cast("Style | Role", style)
            try:
                findings = ranks.run(2, examine, training_in(entry, on_ranks), on_ranks, steps, timeout=300.0)
            except RankError as error:
                yield (entry.name, entry.kind, style, "", "", "", _reason(error))
            else:
                yield (entry.name, entry.kind, style, *_figures(findings))


def _figures(findings: list[Finding]) -> tuple[str, ...]:
    """The figures of the first rank, and the worst difference of all ranks."""
    first = findings[0]
    wrong = [line for finding in findings for line in (*finding.unequal, *finding.whole)]
    agrees = wrong[0] if wrong else f"yes, to {max(finding.worst for finding in findings):.0e}"
    collectives = ", ".join(f"{count} {kind}" for kind, count in sorted(first.collectives.items()))
    return f"{first.nodes:,}", collectives, f"{first.seconds:.1f}", agrees


def _reason(error: RankError) -> str:
    """The sentence of an error: the last line of its traceback that is not a note."""
    first = str(error).split("\nrank ")[0]
    sentences = [line for line in first.splitlines() if line[:1].strip() and ("Error" in line or "Exception" in line)]
    return (sentences or first.splitlines())[-1]


def _table(lines: list[tuple[str, ...]]) -> Table:
    table = Table(
        title="Real models on 2 ranks, in fp64, against one process with the whole batch", title_justify="left"
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in ("nodes", "seconds") else "left")
    for line in lines:
        table.add_row(*line)
    return table


def _markdown(lines: list[tuple[str, ...]], before: str) -> str:
    """A row for each architecture, styles side by side where they differ; no seconds, which differ from run to run.

    What was not run now stands as it did before; nodes and collectives are rewritten in a run of all in both styles.
    """
    kept = {row[0]: row for row in (line.strip("| ").split(" | ") for line in before.splitlines())}
    has_run = {style: _of(style, lines) for style in (*STYLES, *COLUMNS)}
    all_run = all(has_run[style].keys() == {entry.name for entry in ENTRIES} for style in STYLES)
    columns = [k for k, heading in enumerate(HEADINGS) if heading not in ("style", "seconds")]
    rows = [(*(HEADINGS[k] for k in columns), *COLUMNS), ("---",) * (len(columns) + len(COLUMNS))]
    for name in (entry.name for entry in ENTRIES if all_run or entry.name in kept):
        row = [*kept.get(name, ()), *[""] * len(rows[0])][: len(rows[0])]
        if all_run:
            cells = _side_by_side([has_run[style][name] for style in STYLES])
            row[: len(columns)] = [cells[k] for k in columns]
        for k, column in enumerate(COLUMNS, len(columns)):
            row[k] = _cell(has_run[column].get(name, (row[k],))[-1])
        rows.append(tuple(row))
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _cell(agrees: str) -> str:
    """Of a step that does not run, the line of the model: sentences are too long for a table."""
    line = re.search(r"[\w/]+\.py:\d+", agrees)
    return f"stops at {line[0]}" if line else agrees


def _of(style: str, lines: list[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The lines of a style, by architecture."""
    return {line[0]: line for line in lines if line[HEADINGS.index("style")] == style}


def _side_by_side(lines: list[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(" / ".join(dict.fromkeys(cells)) for cells in zip(*lines, strict=True))


if __name__ == "__main__":
    sys.exit(main())
