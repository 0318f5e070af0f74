"""The two arms of a comparison: where their source is, and the options they run with.

Of a commit, ``spmd`` and ``passes`` are checked out into a temporary folder; the benchmark is today's for both arms.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..peers.spellings import CLEARS

ROOT = Path(__file__).parents[2]
PACKAGES = ("spmd", "passes")


@dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    ``system``: a name in ``benchmarks.peers.systems``, or empty for spmd with ``style``, ``mode`` (options of
    ``DataParallel``) and ``compile`` (options of ``spmd.compile``). ``clears``: when steps clear gradients. ``watch``:
    what each call looks at, as ``step.watch`` takes it. ``slower``: the share of busy work that is added to all that is
    measured, to see whether the gate finds it.
    """

    name: str
    source: Path = ROOT
    system: str = ""
    style: str = "fully_shard"
    mode: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)
    clears: tuple[str, ...] = ("last", "first")
    watch: tuple[str, ...] = ()
    slower: float = 0.0


def arm(name: str, text: str) -> Arm:
    """The arm that a text of options describes: ``--style replicate --mode shard_optimizer=True``."""
    parser = argparse.ArgumentParser(prog=f"arm {name}", description="The options of one arm.")
    parser.add_argument("--style", default=Arm.style, help="a style of spmd.DataParallel (%(default)s)")
    parser.add_argument("--mode", nargs="+", default=[], type=_option, help="its options, as name=value")
    parser.add_argument("--compile", nargs="+", default=[], type=_option, help="of spmd.compile, as name=value")
    parser.add_argument("--system", default="", help="instead, one that benchmarks.peers races, by name")
    parser.add_argument("--clears", nargs="+", choices=CLEARS, default=Arm.clears, help="gradients (last first)")
    parser.add_argument(
        "--watch", nargs="+", default=(), metavar="WORD", help="in each call: a pattern, then statistics"
    )
    parser.add_argument("--slower", type=float, default=0.0, metavar="SHARE", help="plant busy work: 0.03 is 3%%")
    found = parser.parse_args(shlex.split(text))
    return Arm(
        name,
        system=found.system,
        style=found.style,
        mode=dict(found.mode),
        compile=dict(found.compile),
        clears=tuple(found.clears),
        watch=tuple(found.watch),
        slower=found.slower,
    )


def _option(text: str) -> tuple[str, Any]:
    """``name=value``, where a value that is no literal of Python is text."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    with contextlib.suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    return name, value


@contextlib.contextmanager
def checkouts(commit: str) -> Iterator[tuple[Path, Path]]:
    """Folders with ``spmd`` and ``passes`` of a commit, and with those of this checkout as they are now.

    Both are fresh copies on one file system, so that the arms differ in nothing else, and edits meanwhile do no harm.
    Raises ``ValueError`` for a commit that git does not know, or that has no such packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        base, here = Path(folder, "base"), Path(folder, "here")
        try:
            _git("worktree", "add", "--quiet", "--detach", "--no-checkout", str(base), commit)
            _git("-C", str(base), "checkout", "--quiet", "HEAD", "--", *PACKAGES)
            for name in PACKAGES:
                shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
            yield base, here
        finally:
            if base.exists():
                _git("worktree", "remove", "--force", str(base))


def described(commit: str) -> str:
    """A commit as a person names it: its tag or short hash."""
    return _git("describe", "--tags", "--always", commit)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"`git {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout.strip()
