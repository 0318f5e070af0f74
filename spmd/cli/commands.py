"""The commands of ``python -m spmd``; each one is a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import (
    cache_command,
    calibrate_command,
    diff_command,
    doctor_command,
    fuzz_command,
    html_command,
    inspect_command,
    replay_command,
    verify_command,
    why_command,
)

_COMMANDS = (
    inspect_command,
    diff_command,
    why_command,
    html_command,
    verify_command,
    fuzz_command,
    replay_command,
    calibrate_command,
    doctor_command,
    cache_command,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` begins with, and end with its exit code."""
    arguments = parser().parse_args(argv)
    raise SystemExit(arguments.run(arguments))


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    made = argparse.ArgumentParser("python -m spmd", description="Commands of spmd, a compiler for train steps.")
    commands = made.add_subparsers(dest="command", required=True)
    for each in _COMMANDS:
        each.add_command(commands)
    return made
