"""``spmd fuzz``: verify random small steps, to find where a compiled step differs from the plain one.

Each step is a file that is written from random choices: its layers, ops, loss, optimizer, mode, mesh and passes. A step
that fails is shrunk, and its file written to a folder; it runs alone, with python::

    python -m spmd fuzz --count 500 --seed 0
    python -m spmd fuzz --count 50 --seed 7 --out found --json

It ends with 0 where all agree or are refused in a sentence, with 1 where one fails, with 2 where an option is wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from ..fuzzing.search import Findings, Progress

_LINE_EACH = 100  # steps


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``fuzz`` to its parser."""
    command.add_argument("--count", type=int, default=100, help="steps to verify (%(default)s)")
    command.add_argument("--seed", type=int, default=0, help="the same steps for the same number (%(default)s)")
    command.add_argument("--out", type=Path, default=Path("fuzz"), help="the folder for steps that fail (%(default)s)")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Verify, print, and return the exit code."""
    if arguments.count < 1:
        parser.error(f"expected --count to be 1 or more, got {arguments.count}")
    if find_spec("hypothesis") is None:
        parser.error('hypothesis chooses the steps, and is not installed: pip install "spmd[fuzz]"')
    from ..fuzzing.search import fuzz

    with _progress(arguments.count) as progress:
        findings = fuzz(arguments.count, arguments.seed, arguments.out, progress)
    if arguments.json:
        print(json.dumps(findings.to_dict(), indent=2))
    else:
        _print(findings)
    return 1 if findings.failures else 0


@contextmanager
def _progress(count: int) -> Iterator[Progress]:
    """A bar on a terminal; a line for each hundred steps in a log."""
    console = Console(stderr=True, soft_wrap=True)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=count)

        def update(what: str, findings: Findings) -> None:
            bar.update(task, description=what, completed=findings.count)
            if not console.is_terminal and findings.count and findings.count % _LINE_EACH == 0:
                console.print(findings.summary(), markup=False)

        yield update


def _print(findings: Findings) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for failure in findings.failures:
        console.print(f"{failure.path}: {failure.outcome.reason}", markup=False)
        console.print(failure.outcome.details, markup=False)
    for sentence, times in findings.refusals.most_common():
        console.print(f"refused {times}: {sentence}", markup=False)
    console.print(findings.summary(), markup=False)
