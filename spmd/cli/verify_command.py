"""``spmd verify FILE:STEP``: compare a compiled step with the plain one, on simulated ranks.

FILE is a Python file with the compiled STEP and a function that returns its arguments, with the whole batch::

    python -m spmd verify train.py:train_step --world 4
    python -m spmd verify train.py:train_step --mesh dp=2,tp=2 --args small_batch --json
    python -m spmd verify train.py:train_step --world 1024 --certify

With --certify the programs are not run but derived from rules; what cannot be shown so is compared as without it. It
ends with 0 where all agrees, with 1 where something differs, and with 2 where FILE, STEP or an option is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console

from passes import SpmdError

from ..step import CompiledStep
from ..verification.certificate import Certificate
from ..verification.certify import certify
from ..verification.verdict import Verdict
from ..verification.verifier import MOST, verify
from ..verification.world import simulated_world


def add_command(commands: Any) -> None:
    """Add ``verify`` and its options to the commands of a parser."""
    command = commands.add_parser(
        "verify",
        help="compare a compiled step with the plain one, on simulated ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "step", metavar="FILE:STEP", help="a Python file, and the compiled step in it, or trainer.step"
    )
    command.add_argument("--args", default="example_args", help="the function that returns its arguments (%(default)s)")
    command.add_argument("--world", type=int, help="ranks to simulate; 4 without a mesh")
    command.add_argument("--mesh", help="ranks along each axis, such as dp=2,tp=2; by default one axis, dp")
    command.add_argument("--steps", type=int, default=3, help="steps to compare (%(default)s)")
    command.add_argument("--certify", action="store_true", help="derive what the programs compute, up to 1,024 ranks")
    command.add_argument("--json", action="store_true", help="print the verdict, or the certificate, as JSON")
    command.set_defaults(run=lambda arguments: run(arguments, command))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Verify, print, and return the exit code."""
    try:
        mesh = _mesh(arguments.mesh)
        world = arguments.world or (math.prod(mesh.values()) if mesh else 4)
        with simulated_world(world, mesh, "cpu"):  # the file may make a mesh of its own
            step, given = _load(arguments.step, arguments.args)
            certificate = certify(step, *given, world=world, mesh=mesh) if arguments.certify else None
            found: list[Certificate | Verdict] = [certificate] if certificate is not None else []
            if certificate is None or (certificate.outcome == "cannot show" and world <= MOST):
                found.append(verify(step, *given, steps=arguments.steps, world=world, mesh=mesh))
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


def _mesh(text: str | None) -> dict[str, int] | None:
    """Raises ``ValueError`` for anything but ``axis=size,axis=size``."""
    if text is None:
        return None
    pairs = [each.partition("=") for each in text.split(",")]
    if not all(name and size.isdigit() and int(size) for name, _, size in pairs):
        raise ValueError(f"expected --mesh as axes with their sizes, such as dp=2,tp=2, got {text!r}")
    return {name: int(size) for name, _, size in pairs}


def _load(which: str, args: str) -> tuple[Any, tuple[Any, ...]]:
    """The step of a file, and its arguments. Raises ``ValueError`` with the names there are for one that is not."""
    path, _, name = which.rpartition(":")
    if not path or not name:
        raise ValueError(f"expected FILE:STEP, such as train.py:train_step, got {which!r}")
    module = _imported(Path(path))
    steps = [key for key, value in vars(module).items() if isinstance(value, CompiledStep)]
    step = _attribute(module, name)
    if not isinstance(getattr(step, "__func__", step), CompiledStep):
        raise ValueError(
            f"{path} has no compiled step {name!r}; it has {', '.join(steps) or 'none'}. One that is a method goes by "
            "trainer.step, or by Trainer.step with the trainer as the first argument"
        )
    make = getattr(module, args, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and key not in steps]
        raise ValueError(
            f"{path} has no function {args!r}: let one return the arguments of {name} with the whole batch, and name "
            f"it with --args; it has {', '.join(functions) or 'none'}"
        )
    given = make()
    return step, tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _attribute(module: Any, name: str) -> Any:
    """The attribute of a module by its path; None if there is none."""
    found = module
    for key in name.split("."):
        found = getattr(found, key, None)
    return found


def _imported(path: Path) -> Any:
    if not path.is_file():
        near = sorted(each.name for each in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise FileNotFoundError(f"there is no file {path}; {path.parent} has {', '.join(near) or 'no Python files'}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a Python file can be imported"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as if it were run
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
