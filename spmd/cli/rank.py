"""One rank of ``spmd run``: runs a script as ``python`` does, and prints an error if no other rank of its host has."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ..ranks.printed_errors import PRINTED_BY

FOLDER = "SPMD_RUN_FOLDER"  # the environment variable that names a folder of the ranks of this host
# Files in it, each with the number of a start or a local rank. That of a start has text once its error is printed.
FAILED, FOLLOWED, ENDED = "failed", "followed", "ended"


def main() -> None:
    """Run ``file SCRIPT ARGUMENTS`` or ``module NAME ARGUMENTS``."""
    _, kind, script, *arguments = sys.argv
    sys.argv = [script, *arguments]
    for name in (FOLLOWED, ENDED):  # of an earlier start
        _own_file(name).unlink(missing_ok=True)
    try:
        if kind == "module":
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except SystemExit as end:
        raise SystemExit(_exit_code(end)) from None
    except BaseException as error:
        _fail(error)
        raise SystemExit(1) from None
    _own_file(ENDED).touch()


def _exit_code(end: SystemExit) -> int:
    """The exit code of a script that has called ``sys.exit``; a message is printed by the first rank only."""
    if not end.code:
        _own_file(ENDED).touch()
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    with _first() as is_first:
        if is_first:
            print(end.code, file=sys.stderr)
    return 1


def _fail(error: BaseException) -> None:
    """Print an error by the script's own hook, if this rank is the first; leave one that follows it in a file."""
    errors = sys.modules.get("passes.errors")
    if errors is not None and isinstance(error, errors.RankFailedError):
        _own_file(FOLLOWED).write_text(f"{type(error).__name__}: {error}")
        with _first(prints=False):
            return
    with _first() as is_first:
        if is_first:
            error.add_note(f"on rank {_rank()} of {os.environ['WORLD_SIZE']}")
            vars(error).pop(PRINTED_BY, None)
            error = error.with_traceback(_in_script(error.__traceback__))
            sys.excepthook(type(error), error, error.__traceback__)


def _in_script(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame on that is neither of this file nor of ``runpy``."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback is not None and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


@contextmanager
def _first(prints: bool = True) -> Iterator[bool]:
    """Whether no rank of this host has printed an error since the ranks were last started, and this one ``prints`` one.

    Others wait until it has: a rank that ends first has torchrun stop all, also in the middle of a line.
    """
    with open(_file(FAILED, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), "a") as file:
        _lock(file.fileno())
        is_first = os.fstat(file.fileno()).st_size == 0
        yield is_first
        if is_first and prints:
            file.write(f"{_rank()}\n")


def _lock(file: int) -> None:
    """Wait until no other process has the lock of a file. It is released where the file is closed."""
    try:
        import fcntl  # not on every system
    except ImportError:
        return
    fcntl.flock(file, fcntl.LOCK_EX)


def _own_file(name: str) -> Path:
    return _file(name, os.environ["LOCAL_RANK"])


def _file(name: str, number: str) -> Path:
    return Path(os.environ[FOLDER], f"{name}-{number}")


def _rank() -> str:
    return os.environ["RANK"]


if __name__ == "__main__":
    main()
