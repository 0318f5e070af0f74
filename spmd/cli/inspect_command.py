"""``spmd inspect FOLDER``: the stages of a dumped program, what each pass did, and what a step communicates and needs.

FOLDER is that of a program, or of a step with one program::

    python -m spmd inspect runs/train_step
    python -m spmd inspect runs/train_step/program-0 --json

It ends with 0, and with 2 where FOLDER is wrong.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from passes import Report
from passes.ir.dump_text import read_statements

from .dump_folder import program_folder, report_of, stages_of


@dataclass(frozen=True)
class Stage:
    """One stage. ``values``: how many its program computes; ``did``: what its pass says it did."""

    name: str
    values: int
    did: str


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``inspect`` to its parser."""
    command.add_argument("folder", metavar="FOLDER", type=Path, help="a folder that compile(dump=...) wrote")
    command.add_argument("--json", action="store_true", help="print stages and report as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Read, print, and return the exit code."""
    try:
        folder = program_folder(arguments.folder)
        report = report_of(folder)
        stages = _stages(folder, report)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps({"stages": [asdict(each) for each in stages], "report": report.to_dict()}, indent=2))
    else:
        console = Console(soft_wrap=True)
        console.print(_table(folder, stages))
        console.print(report)
    return 0


def _stages(folder: Path, report: Report) -> list[Stage]:
    did = {line[:2]: line.partition(": ")[2] for line in report.history}
    return [
        Stage(path.stem, sum(not each.role for each in read_statements(path.read_text())), did.get(path.name[:2], ""))
        for path in stages_of(folder)
    ]


def _table(folder: Path, stages: list[Stage]) -> Table:
    table = Table(title=str(folder), title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("values", justify="right")
    table.add_column("did", overflow="fold")
    for each in stages:
        table.add_row(each.name, f"{each.values:,}", Text(each.did))
    return table
