"""A program that is forked is what it would be from a command line: its streams, its exit code, its environment."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from . import programs

pytestmark = pytest.mark.processes


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_streams_exit_code_arguments_and_environment(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        print(__name__, sys.argv[1:], os.environ["GIVEN"], flush=True)
        os.system("echo of a child")
        print("wrong", file=sys.stderr)
        sys.exit(3)
        """,
    )
    done = programs.run([path, "--option", 1], os.environ | {"GIVEN": "here"})
    assert done.returncode == 3
    assert done.stdout == "__main__ ['--option', '1'] here\nof a child\n"
    assert done.stderr == "wrong\n"


def test_an_error_is_a_traceback_and_one(tmp_path: Path) -> None:
    done = programs.run([script(tmp_path, "raise ValueError('of mine')")])
    assert done.returncode == 1 and "ValueError: of mine" in done.stderr and done.stdout == ""


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run([script(tmp_path, "import time; time.sleep(60)")], timeout=0.5)
