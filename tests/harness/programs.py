"""Programs as from a command line, in processes forked from the server of the ranks: nothing is imported again.

``run([script, *arguments])``, and ``run(["-m", module, *arguments])``, return what ``subprocess.run`` does: the exit
code and the text of both streams. The program is ``__main__``, has the environment that it is given, and may fork.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import start_processes

from .pool import PRELOADED

ROOT = Path(__file__).parents[2]
STREAMS = ("out", "err")  # the files of 1 and 2


def run(
    command: Sequence[object], env: Mapping[str, str] | None = None, timeout: float = 500.0
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; ``env``: its environment, by default ours.

    Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    text = [str(each) for each in command]
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_become, args=(text, dict(os.environ if env is None else env), folder))
        process.start()
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(text, timeout)
        finally:
            process.kill()
        printed = [Path(folder, name).read_text() for name in STREAMS]
    return subprocess.CompletedProcess(text, process.exitcode, *printed)


def spawn(function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True) -> Any:
    """What ``torch.multiprocessing.spawn`` does, in processes forked from that server, too."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    return start_processes(function, args, nprocs, join, start_method="forkserver")


def _become(command: list[str], env: dict[str, str], folder: str) -> None:
    """Be the program, from here to the end of this process."""
    for stream, name in enumerate(STREAMS, start=1):
        os.dup2(os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    is_module = command[0] == "-m"
    sys.argv = command[is_module:]
    sys.path[0:0] = [str(ROOT) if is_module else str(Path(command[0]).parent)]
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(command[0], run_name="__main__")
