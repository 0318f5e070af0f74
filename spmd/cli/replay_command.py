"""``spmd replay FOLDER``: run a recorded call again, up to the first NaN or Inf.

FOLDER is that of ``step.record(FOLDER)``, with the records of all ranks. They run in one process, without a network::

    python -m spmd replay crash --rank 3 --call 57

It ends with 0 where all values are finite, with 1 where one is not, and with 2 where FOLDER, the rank or the call is
wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from passes import SpmdError

from ..verification.replay import NotFinite, Replay, replay


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``replay`` to its parser."""
    command.add_argument("folder", metavar="FOLDER", type=Path, help="the folder that step.record(...) wrote to")
    command.add_argument("--rank", type=int, default=0, help="the rank to look at (%(default)s)")
    command.add_argument("--call", type=int, help="the number of the call; the last one by default")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Replay, print, and return the exit code."""
    try:
        found = replay(arguments.folder, arguments.rank, arguments.call)
    except (ValueError, OSError, SpmdError) as error:
        parser.error(str(error))
    print(json.dumps(asdict(found), indent=2) if arguments.json else "\n".join(_lines(found)))
    return 1 if found.found else 0


def _lines(found: Replay) -> Iterator[str]:
    since = found.call - found.since
    state = f"with the state that was recorded {since} calls before" if since else "with the state recorded before it"
    yield f"call {found.call} of {found.step} on {found.mesh}, rank {found.rank}: {found.program}, {state}"
    if found.found is None:
        results = "".join(f"; {name} = {value:.6g}" for name, value in found.results.items())
        yield f"all values are finite{results}"
        return
    yield from _described(found.found, "the first value that is not finite")
    if found.origin is not None:
        yield from _described(found.origin, f"before that, on rank {found.origin.rank}")


def _described(found: NotFinite, what: str) -> Iterator[str]:
    yield f"{what}: {found.kind} in {found.count:,} of {found.of:,} elements"
    yield f"    {found.text}"
    yield from (f"    {operand}" for operand in found.operands)
    if where := ", ".join(part for part in (found.run, found.phase, found.module, found.line) if part):
        yield f"    in {where}"
