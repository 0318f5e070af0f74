"""``spmd plan FILE:STEP``: the fastest layouts of a step on GPUs that are not here, by estimate.

FILE is a Python file with the compiled STEP and a function that returns its arguments, with the whole batch; models may
be on the meta device, and nothing of them runs::

    python -m spmd plan train.py:train_step --gpus 64 --gpu H100 --per-host 8
    python -m spmd plan train.py:train_step --gpus 8 --gpu A100 --memory 40GB --rows 256 --json
    python -m spmd plan train.py:train_step --gpus 64..4096 --gpu A100,H100 --page plans.html

It ends with 0 where a layout fits, with 1 where none does, and with 2 where FILE, STEP or an option is wrong. What the
estimates are worth: docs/plan.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console

from passes import SpmdError, Table

from ..planning.page import page
from ..planning.plans import Plans, compared
from ..planning.search import check, search
from ..planning.step_work import CapturedStep
from ..verification.world import simulated_world
from .step_file import load_step


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``plan`` to its parser."""
    command.add_argument(
        "step", metavar="FILE:STEP", help="a Python file, and the compiled step in it, or trainer.step"
    )
    command.add_argument("--args", default="example_args", help="the function that returns its arguments (%(default)s)")
    command.add_argument(
        "--gpus",
        type=_counts,
        required=True,
        help="how many GPUs there are: 64, several: 64,128, or 64..4096 for each power of two more",
    )
    command.add_argument("--gpu", default="H100", help="their kind, or several: A100,H100; CPU for gloo (%(default)s)")
    command.add_argument("--per-host", type=int, help="GPUs in a host; by default as they are sold")
    command.add_argument("--memory", help="what a GPU may hold, such as 70GB; by default all but 2 GB")
    command.add_argument("--rows", type=int, help="rows of the whole batch; by default those of the arguments")
    command.add_argument("--top", type=int, default=10, help="how many layouts are listed (%(default)s)")
    command.add_argument(
        "--table", metavar="COSTS.json", type=Path, help="rates that spmd calibrate measured, in the place of published"
    )
    command.add_argument("--page", metavar="FILE.html", type=Path, help="write a page of the plans")
    command.add_argument("--json", action="store_true", help="print the plans as JSON")
    command.add_argument(
        "--against", metavar="PLAN.json", type=Path, help="an earlier plan, as --json printed it: what changed, and why"
    )


def _counts(text: str) -> list[int]:
    """The numbers of GPUs that ``64``, ``64,128`` or ``64..4096`` stands for."""
    counts: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            count, most = int(first), int(last if dots else first)
        except ValueError:
            count, most = 1, 0
        if count > most or (dots and count < 1):
            raise argparse.ArgumentTypeError(
                f"expected a number such as 64, several such as 64,128, or a range such as 64..4096, got {text!r}"
            )
        counts += [count << k for k in range(most.bit_length()) if count << k <= most] if dots else [count]
    return counts


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Plan, print, and return the exit code."""
    options = {name: getattr(arguments, name) for name in ("per_host", "memory", "rows", "top")}
    machines = [(gpu, gpus) for gpu in arguments.gpu.split(",") for gpus in arguments.gpus]
    found, reasons = list[Plans](), list[str]()
    if arguments.table and len({gpu for gpu, _ in machines}) > 1:
        parser.error(f"expected --table with one kind of GPUs, those that it measured, got --gpu {arguments.gpu}")
    try:
        options["table"] = Table.read(arguments.table) if arguments.table else None
        for gpu, gpus in machines:
            check(gpus, gpu, arguments.per_host, arguments.rows, arguments.top)
        # The file may make a mesh of its own; and what it prints is no part of the plans.
        with simulated_world(1, None, "cpu"), redirect_stdout(sys.stderr):
            step, given = load_step(arguments.step, arguments.args)
        with redirect_stdout(sys.stderr):
            captured = CapturedStep(step, given, {})
            for gpu, gpus in machines:
                try:
                    found.append(search(captured, gpus, gpu, **options))
                except ValueError as error:  # its rows do not divide, but may on other machines
                    reasons.append(str(error))
        if not found:
            raise ValueError(reasons[0])
    except (SpmdError, ValueError, TypeError, FileNotFoundError) as error:
        parser.error(str(error))
    except Exception:  # of the file, or of its step
        traceback.print_exc()
        return 2
    changed = _changed(arguments.against, found, parser, is_one=len(machines) == 1)
    if arguments.page:
        try:
            arguments.page.write_text(page(found), encoding="utf-8")
        except OSError as error:
            parser.error(f"expected a file that can be written, got {arguments.page}: {error.strerror}")
    _print(found, reasons, arguments.json, changed, is_one=len(machines) == 1)
    return 0 if all(found) and not reasons else 1


def _changed(path: Path | None, found: list[Plans], parser: argparse.ArgumentParser, is_one: bool) -> list[str]:
    """Lines on what changed since the plan of ``--against``; none without it."""
    if path is None:
        return []
    if not is_one:
        parser.error("expected --against with one kind and one number of GPUs, whose plan it compares")
    try:
        return found[0].against(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        parser.error(f"expected --against to name a plan that --json printed, got {path}: {error}")


def _print(found: list[Plans], reasons: list[str], as_json: bool, changed: list[str], is_one: bool) -> None:
    """One plan with all that there is to say, or a line for each machine; and what changed since an earlier one."""
    if as_json:
        entries = [each.to_dict() for each in found]
        print(json.dumps(entries[0] | ({"changes": changed} if changed else {}) if is_one else entries, indent=2))
        return
    console = Console()
    console.print(found[0] if is_one else compared(found))
    for reason in [*reasons, *(f"since then: {each}" for each in changed)]:
        console.print(reason, markup=False)
