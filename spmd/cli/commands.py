"""The commands of ``python -m spmd``; each one is a file, which is imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from ..version import __version__

_COMMANDS = {
    "run": "start a training script on the ranks of this host, or of several",
    "inspect": "the stages of a dumped program, and its report",
    "diff": "what passes changed in a dumped program",
    "why": "why each program was compiled, or the collectives that a parameter or a module causes",
    "html": "the page of a dumped program, as one HTML file",
    "verify": "compare a compiled step with the plain one, on simulated ranks",
    "rules": "the sharding rules of ops, and what one claims of a call",
    "check": "every refusal of a step at once, before it is launched",
    "plan": "the fastest layouts of a step on GPUs that are not here, by estimate",
    "fuzz": "verify random small steps",
    "replay": "run a recorded call again, up to the first NaN or Inf",
    "calibrate": "measure what communication costs, into a file",
    "cache": "list, check or clear what compiled steps have kept on disk",
    "doctor": "what works on this machine, and what does not",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` begins with, and end with its exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = parser(given).parse_args(given)
    raise SystemExit(arguments.run(arguments))


def parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands, with the options of the one that ``given`` begins with."""
    made = argparse.ArgumentParser("spmd", description="Commands of spmd, a compiler for train steps.")
    made.add_argument("--version", action="version", version=f"spmd {__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
        if given and name == given[0]:
            found = import_module(f".{name}_command", __package__)
            command.description = found.__doc__
            found.add_options(command)
            command.set_defaults(run=partial(found.run, parser=command))
    return made
