"""``spmd diff FOLDER PASS``: what one pass changed in a dumped program, value by value; or what changed between runs.

FOLDER is that of a program, or of a step with one program; stages go by number or by name::

    python -m spmd diff runs/train_step/program-0 bucket_all_reduce
    python -m spmd diff runs/train_step/program-0 01 99 --json

With one stage it is compared with the one before. - is gone, + is new, ~ has changed, > has moved. Without a stage, the
reports of two runs are compared: what of time, collectives, memory and passes is other, and why. Each is a folder with
a report, or a file that ``report.save("run.json")`` wrote, after ``step.profile()`` with measured times::

    python -m spmd diff run.json --against runs/train_step/program-0

It ends with 0 if nothing differs, with 1 if something does, and with 2 where FOLDER or a stage is wrong.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from passes import Diff, Report

from ..dump import stages_to_compare
from .dump_folder import program_folder, report_of, stages_of


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``diff`` to its parser."""
    command.add_argument("folder", metavar="FOLDER", type=Path, help="a folder that compile(dump=...) wrote")
    command.add_argument(
        "stages", metavar="STAGE", nargs="*", help="one or two stages, such as 06 or bucket_all_reduce"
    )
    command.add_argument("--against", metavar="EARLIER", type=Path, help="an earlier run: what changed since, and why")
    command.add_argument("--json", action="store_true", help="print the changes as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Compare, print, and return the exit code."""
    if bool(arguments.stages) == bool(arguments.against):
        parser.error("expected a stage, or --against with an earlier run")
    try:
        if arguments.against:
            return _compare_runs(arguments.against, arguments.folder, arguments.json)
        before, after = _stages(arguments.folder, arguments.stages)
        diff = Diff.of_texts(before.read_text(), after.read_text(), (before.name, after.name))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps(diff.to_dict(), indent=2))
    else:
        Console(soft_wrap=True).print(diff)
    return int(bool(diff))


def _compare_runs(earlier: Path, later: Path, as_json: bool) -> int:
    """Print what changed between two runs, and return the exit code."""
    before, after = (_report(each) for each in (earlier, later))
    found = after.against(before)
    print(json.dumps(found, indent=2) if as_json else "\n".join(found))
    return int(found != before.against(before))


def _report(path: Path) -> Report:
    """That of a file, or of the program in a folder."""
    return Report.from_dict(json.loads(path.read_text())) if path.is_file() else report_of(program_folder(path))


def _stages(folder: Path, wanted: list[str]) -> tuple[Path, Path]:
    folder = program_folder(folder)
    stages = {path.stem: path for path in stages_of(folder)}
    before, after = stages_to_compare(list(stages), wanted)
    return stages[before], stages[after]
