"""``spmd check FILE:STEP``: every refusal of a step at once, before it is launched.

FILE is a Python file with the compiled STEP and a function that returns its arguments, with the whole batch. The step
is traced in this process, on simulated ranks; nothing of it runs, and models may be on the meta device::

    python -m spmd check train.py:train_step
    python -m spmd check train.py:train_step --mode replicate --mode fully_shard --world 8
    python -m spmd check train.py:train_step --mesh dp=2,tp=2 --args small_batch --json

It ends with 0 where nothing is refused, with 1 where something is, and with 2 where FILE, STEP or an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from contextlib import redirect_stdout

from rich.console import Console, Group

from passes import SpmdError

from ..checking import check, lines_of
from ..modes.shares import STYLES
from ..verification.world import check_mesh, simulated_world
from .step_file import load_step
from .verify_command import mesh_of


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``check`` to its parser."""
    command.add_argument(
        "step", metavar="FILE:STEP", help="a Python file, and the compiled step in it, or trainer.step"
    )
    command.add_argument("--args", default="example_args", help="the function that returns its arguments (%(default)s)")
    command.add_argument(
        "--mode",
        action="append",
        default=[],
        choices=tuple(STYLES),
        metavar="STYLE",
        help=f"one of {', '.join(STYLES)}, in the place of its own mode; given several times, each is checked",
    )
    command.add_argument("--world", type=int, help="ranks to simulate; 2 without a mesh")
    command.add_argument("--mesh", help="ranks along each axis, such as dp=2,tp=2; by default one axis, dp")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Check, print, and return the exit code."""
    try:
        mesh = mesh_of(arguments.mesh)
        world = arguments.world if arguments.world is not None else math.prod(mesh.values()) if mesh else 2
        check_mesh(mesh, world)
        # The file may make a mesh of its own; and what it prints is no part of what was found.
        with simulated_world(world, mesh, "cpu"), redirect_stdout(sys.stderr):
            step, given = load_step(arguments.step, arguments.args)
            found = check(step, *given, modes=list(dict.fromkeys(arguments.mode)), world=world, mesh=mesh)
    except (SpmdError, ValueError, TypeError, FileNotFoundError) as error:
        parser.error(str(error))
    except Exception:  # of the file; what its step raises is found
        traceback.print_exc()
        return 2
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        Console().print(Group(*lines_of(found)))
    return 0 if found else 1
