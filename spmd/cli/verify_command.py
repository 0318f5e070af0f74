"""``spmd verify FILE:STEP``: compare a compiled step with the plain one, on simulated ranks.

FILE is a Python file with the compiled STEP and a function that returns its arguments, with the whole batch::

    python -m spmd verify train.py:train_step --world 4
    python -m spmd verify train.py:train_step --mesh dp=2,tp=2 --args small_batch --json
    python -m spmd verify train.py:train_step --world 1024 --certify
    python -m spmd verify train.py:train_step --world 3 --bits

With --certify the programs are not run but derived from rules; what cannot be shown so is compared as without it. It
ends with 0 where all agrees, with 1 where something differs, and with 2 where FILE, STEP or an option is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import traceback

from rich.console import Console

from passes import SpmdError

from ..verification.certificate import Certificate
from ..verification.certify import certify
from ..verification.verdict import Verdict
from ..verification.verifier import MOST, verify
from ..verification.world import simulated_world
from .step_file import load_step


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``verify`` to its parser."""
    command.add_argument(
        "step", metavar="FILE:STEP", help="a Python file, and the compiled step in it, or trainer.step"
    )
    command.add_argument("--args", default="example_args", help="the function that returns its arguments (%(default)s)")
    command.add_argument("--world", type=int, help="ranks to simulate; 4 without a mesh")
    command.add_argument("--mesh", help="ranks along each axis, such as dp=2,tp=2; by default one axis, dp")
    command.add_argument("--steps", type=int, default=3, help="steps to compare (%(default)s)")
    command.add_argument("--certify", action="store_true", help="derive what the programs compute, up to 1,024 ranks")
    command.add_argument("--bits", action="store_true", help="compare one rank with several, to the last bit")
    command.add_argument("--json", action="store_true", help="print the verdict, or the certificate, as JSON")


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Verify, print, and return the exit code."""
    try:
        mesh = mesh_of(arguments.mesh)
        world = arguments.world or (math.prod(mesh.values()) if mesh else 4)
        with simulated_world(world, mesh, "cpu"):  # the file may make a mesh of its own
            step, given = load_step(arguments.step, arguments.args)
            certificate = certify(step, *given, world=world, mesh=mesh) if arguments.certify else None
            found: list[Certificate | Verdict] = [certificate] if certificate is not None else []
            if certificate is None or (certificate.outcome == "cannot show" and world <= MOST):
                found.append(verify(step, *given, steps=arguments.steps, world=world, mesh=mesh, bits=arguments.bits))
    except (SpmdError, ValueError, TypeError, FileNotFoundError) as error:
        parser.error(str(error))
    except Exception:  # of the file, or of its step; Python itself would end with 1, as where something differs
        traceback.print_exc()
        return 2
    for each in found if not arguments.json else found[-1:]:
        _print(each, arguments.json)
    return 0 if found[-1] else 1


def _print(found: Certificate | Verdict, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    elif isinstance(found, Certificate):
        print(found)
    else:
        Console().print(found)


def mesh_of(text: str | None) -> dict[str, int] | None:
    """The axes of ``--mesh``. Raises ``ValueError`` for anything but ``axis=size,axis=size``."""
    if text is None:
        return None
    pairs = [each.partition("=") for each in text.split(",")]
    if not all(name and size.isdigit() and int(size) for name, _, size in pairs):
        raise ValueError(f"expected --mesh as axes with their sizes, such as dp=2,tp=2, got {text!r}")
    return {name: int(size) for name, _, size in pairs}
