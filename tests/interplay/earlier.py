"""A row on the commit before: what fails there, too, is not the fault of a change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from .dimensions import Row
from .seeds import git

PACKAGES = ("passes", "spmd")
_TIMEOUT = 300.0  # seconds


def commit_before(root: Path) -> str | None:
    """The commit without the changes of a checkout: its parent, or the commit itself where files were edited since.

    None where there is no history: an exported tree, a shallow clone.
    """
    edited = git(root, "status", "--porcelain", "--", *PACKAGES)
    return git(root, "rev-parse", "--verify", "--quiet", "HEAD" if edited else "HEAD^")


def found_before(root: Path, commit: str, row: Row) -> list[str] | None:
    """The lines of a row with the packages of a commit and the tests of today; None if these do not run there."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        if git(root, "archive", "--format=zip", f"--output={tree / 'packages.zip'}", commit, *PACKAGES) is None:
            return None
        with zipfile.ZipFile(tree / "packages.zip") as packed:
            packed.extractall(tree)
        (tree / "tests").symlink_to(root / "tests")
        (tree / "rows.json").write_text(json.dumps([row]))
        command = [sys.executable, "-m", "tests.interplay", "--rows", "rows.json", "--results", "results.jsonl"]
        env = os.environ | {"PYTHONPATH": folder}
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=tree, env=env, capture_output=True, check=False, timeout=_TIMEOUT)
        results = tree / "results.jsonl"
        lines: list[str] | None = json.loads(results.read_text())["found"] if results.exists() else None
        return lines


def is_old(found: list[str], before: list[str]) -> bool:
    """Whether all that was found is there before, but for numbers: another sentence is another fault."""
    return bool(found) and {*map(_kind, found)} <= {*map(_kind, before)}


def _kind(line: str) -> str:
    """A line without numbers; of a traceback the last line."""
    return re.sub(r"\d[\w.+-]*", "#", line.strip().splitlines()[-1])
