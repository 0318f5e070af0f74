"""The Makefile starts the tests as it was asked to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def printed(*arguments: str, **environment: str) -> str:
    """The commands that ``make`` would run."""
    own = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MAKEFLAGS")}
    command = ["make", "-n", "VENV=.venv", *arguments]
    return subprocess.run(command, cwd=ROOT, env=own | environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["quick", "test"])
def test_the_number_of_threads_can_be_given(target: str) -> None:
    assert "OMP_NUM_THREADS=1 .venv/bin/python -m pytest" in printed(target)
    assert "OMP_NUM_THREADS=2 .venv/bin/python -m pytest" in printed(target, "OMP_NUM_THREADS=2")
    assert "OMP_NUM_THREADS=3 .venv/bin/python -m pytest" in printed(target, OMP_NUM_THREADS="3")
