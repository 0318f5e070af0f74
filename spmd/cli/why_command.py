"""``spmd why FOLDER [NAME]``: every collective that a parameter, a result or a module causes, with the reason.

FOLDER is that of a program, or of a step with one program; a module stands for all that is in it. Without a NAME it
lists the programs in FOLDER, each with the reason that it was compiled::

    python -m spmd why runs/train_step
    python -m spmd why runs/train_step model.blocks.0.up.weight
    python -m spmd why runs/train_step/program-0 model.blocks --json

It ends with 0, with 1 if NAME causes none, and with 2 where FOLDER is wrong or has nothing of that NAME.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from passes import OneCollective, Report
from passes.ir.dump_text import read_statements
from passes.ir.printer import short_dtype

from .dump_folder import program_folder, report_of, reports_in, stages_of

_SHOWN = 12


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``why`` to its parser."""
    command.add_argument("folder", metavar="FOLDER", type=Path, help="a folder that compile(dump=...) wrote")
    command.add_argument("name", metavar="NAME", nargs="?", help="a parameter, result or module: model.blocks.0")
    command.add_argument("--json", action="store_true", help="print the same as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Find, print, and return the exit code."""
    try:
        if arguments.name is None:
            return _show_programs(reports_in(arguments.folder), arguments.json)
        folder = program_folder(arguments.folder)
        every = report_of(folder).every
        found = [one for one in every if one.serves(arguments.name)]
        if not found:
            _check_name(arguments.name, folder, every)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    elif found:
        Console(soft_wrap=True).print(_table(arguments.name, found))
    else:
        print(f"{arguments.name} causes no communication")
    return 0 if found else 1


def _show_programs(reports: Sequence[Report], as_json: bool) -> int:
    """Print why each program was compiled."""
    if as_json:
        print(json.dumps([{"program": each.name, "reason": each.reason} for each in reports], indent=2))
        return 0
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("program", no_wrap=True)
    table.add_column("compiled because of", overflow="fold")
    for each in reports:
        table.add_row(Text(each.name), Text(each.reason))
    Console(soft_wrap=True).print(table)
    return 0


def _check_name(name: str, folder: Path, every: Sequence[OneCollective]) -> None:
    """Raise ``ValueError``, with names that there are, for one that the program does not have."""
    known = {each for one in every for each in (*one.of, one.module)} | set(_in_program(folder))
    if not any(each == name or each.startswith(f"{name}.") for each in known):
        near = sorted(each for each in known if each and name.rpartition(".")[2] in each) or sorted(known - {""})
        listed = ", ".join(near[:_SHOWN]) + (f", and {len(near) - _SHOWN} more" if len(near) > _SHOWN else "")
        raise ValueError(f"{folder} has no parameter, result or module {name!r}: {listed}")


def _in_program(folder: Path) -> Iterator[str]:
    """The names of inputs, and of modules, as they were captured."""
    for each in read_statements(stages_of(folder)[0].read_text()):
        if each.role == "input":
            yield each.text.partition("  # ")[2].partition(":")[0].rpartition(" ")[2]
        elif each.module:
            yield each.module


def _table(name: str, found: Sequence[OneCollective]) -> Table:
    total = sum(one.bytes for one in found)
    title = f"{name}: {len(found)} collective{'s' if len(found) > 1 else ''} in a step, {total:,} bytes of this rank"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for heading in ("collective", "axis", "dtype", "bytes"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", no_wrap=True)
    table.add_column("why", overflow="fold")
    for one in found:
        dtype = short_dtype(getattr(torch, one.dtype))
        cells = (one.kind, one.axis, dtype, f"{one.bytes:,}", "\n".join(_reasons(one)))
        table.add_row(*map(Text, cells))
    return table


def _reasons(one: OneCollective) -> Iterator[str]:
    """Why it is there, how it is done, for which values, and at which line."""
    yield f"{one.why}; {one.by}" if one.by else one.why
    if one.of:
        yield f"for {', '.join(one.of[:3])}{f', ... {one.of[-1]}' if len(one.of) > 3 else ''}"
    if where := ", ".join(part for part in (one.phase, one.module, one.line) if part):
        yield f"in {where}"
