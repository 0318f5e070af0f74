"""``spmd plan FILE:STEP``: the fastest layouts of a step on GPUs that are not here, by estimate.

FILE is a Python file with the compiled STEP and a function that returns its arguments, with the whole batch; models may
be on the meta device, and nothing of them runs::

    python -m spmd plan train.py:train_step --gpus 64 --gpu H100 --per-host 8
    python -m spmd plan train.py:train_step --gpus 8 --gpu A100 --memory 40GB --rows 256 --json

It ends with 0 where a layout fits, with 1 where none does, and with 2 where FILE, STEP or an option is wrong. What the
estimates are worth: docs/plan.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from contextlib import redirect_stdout

from rich.console import Console

from passes import SpmdError
from passes.schedule.gpus import GPUS

from ..planning.search import plan
from ..verification.world import simulated_world
from .step_file import load_step


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``plan`` to its parser."""
    command.description = __doc__
    command.add_argument(
        "step", metavar="FILE:STEP", help="a Python file, and the compiled step in it, or trainer.step"
    )
    command.add_argument("--args", default="example_args", help="the function that returns its arguments (%(default)s)")
    command.add_argument("--gpus", type=int, required=True, help="how many GPUs there are")
    command.add_argument("--gpu", choices=list(GPUS), default="H100", help="their kind (%(default)s)")
    command.add_argument("--per-host", type=int, help="GPUs in a host; by default as they are sold")
    command.add_argument("--memory", help="what a GPU may hold, such as 70GB; by default all but 2 GB")
    command.add_argument("--rows", type=int, help="rows of the whole batch; by default those of the arguments")
    command.add_argument("--top", type=int, default=10, help="how many layouts are listed (%(default)s)")
    command.add_argument("--json", action="store_true", help="print the plans as JSON")
    command.set_defaults(run=lambda arguments: run(arguments, command))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Plan, print, and return the exit code."""
    options = {name: getattr(arguments, name) for name in ("gpus", "gpu", "per_host", "memory", "rows", "top")}
    try:
        # The file may make a mesh of its own; and what it prints is no part of the plans.
        with simulated_world(1, None, "cpu"), redirect_stdout(sys.stderr):
            step, given = load_step(arguments.step, arguments.args)
        with redirect_stdout(sys.stderr):
            found = plan(step, *given, **options)
    except (SpmdError, ValueError, TypeError, FileNotFoundError) as error:
        parser.error(str(error))
    except Exception:  # of the file, or of its step
        traceback.print_exc()
        return 2
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        Console().print(found)
    return 0 if found else 1
