"""``spmd html FOLDER``: the page of a dumped program, one file for a browser: timeline, memory, graphs, placements.

FOLDER is that of a program, or of a step with one program. The page loads nothing: it can be sent as it is::

    python -m spmd html runs/train_step
    python -m spmd html runs/train_step/program-0 --out step.html
    python -m spmd html runs/train_step --watched norms.jsonl

Values that ``step.watch(..., to="norms.jsonl")`` wrote are charts of the page. It ends with 0, and with 2 where FOLDER
is wrong or the page cannot be written.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from passes.page.contents import WATCHED, contents
from passes.page.render import render

from .dump_folder import files_in, program_folder


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``html`` to its parser."""
    command.add_argument("folder", metavar="FOLDER", type=Path, help="a folder that compile(dump=...) wrote")
    command.add_argument("--out", metavar="FILE", type=Path, help="the file to write, by default FOLDER/report.html")
    command.add_argument(
        "--watched", metavar="FILE", type=Path, help="a file that step.watch(..., to=FILE) wrote, for charts"
    )
    command.add_argument("--json", action="store_true", help="print what the page shows as JSON; write nothing")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Read, write, and return the exit code."""
    try:
        folder = program_folder(arguments.folder)
        files, out = files_in(folder), arguments.out or folder / "report.html"
        if arguments.watched:
            files[WATCHED] = arguments.watched.read_text(encoding="utf-8")
        if arguments.json:
            print(json.dumps(contents(files), indent=2))
            return 0
        out.write_text(render(files), encoding="utf-8")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"wrote {out}")
    return 0
