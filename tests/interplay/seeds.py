"""Which rows the default run has: other ones with each commit, the same in all processes of a run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SECONDS = 80.0  # of one core, about, for the rows of the default run
VARIABLE = "INTERPLAY_SEED"
ROOT = Path(__file__).parents[2]


def seed() -> int:
    """That of the environment, else the commit's first digits; 0 where there is no commit."""
    given = os.environ.get(VARIABLE)
    return int(given) if given else int((git(ROOT, "rev-parse", "HEAD") or "0")[:7], 16)


def git(root: Path, *command: str) -> str | None:
    """What git says of a checkout; None where there is none, or git fails."""
    top = _output(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():  # an exported tree may lie in a checkout of something else
        return None
    return _output(root, *command)


def _output(root: Path, *command: str) -> str | None:
    try:
        ended = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ended.stdout.strip()
