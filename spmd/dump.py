"""Dumps: the graph of every stage as numbered text files, and the report.

Files are never a reason for ranks to differ: rank 0 alone writes, and where it cannot, it warns and trains on. A step
has a folder of its own, which other steps of its name and other jobs leave alone.
"""

from __future__ import annotations

import json
import os
import platform
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import torch.distributed as dist

import passes
from passes import Pass, Program, Report

from .source_lines import warn_user

OnStage = Callable[[int, Pass, Program, float], None]
_OWNER = ".job"  # the file in a step's folder that says which process writes there

_taken: set[Path] = set()  # the folders of the steps of this process, also of those that are gone
_lock = threading.Lock()


class StepFolders:
    """The folders that one step dumps to: ``<root>/<name>``, or ``<name>-2`` where that is taken, and so on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.warned = False
        self._folders: dict[Path, Path] = {}

    def dump(self, root: Path | None, program: str) -> Dump:
        """The dump of the program called ``program`` (``step/program-0``); without a root it writes nothing."""
        return Dump(self, root, program.rpartition("/")[2])

    def under(self, root: Path) -> Path:
        """The step's folder under ``root``. Raises ``OSError`` where it cannot be made."""
        root = root.resolve()
        if root not in self._folders:
            root.mkdir(parents=True, exist_ok=True)
            with _lock, _locked(root):
                self._folders[root] = _take(root, self.name)
        return self._folders[root]


class Dump:
    """Writes one program's stages; without a folder, on ranks other than 0, and after an error, it writes nothing."""

    def __init__(self, steps: StepFolders, root: Path | None, program: str) -> None:
        self.steps = steps
        self.folder: Path | None = None
        if root is None or (dist.is_initialized() and dist.get_rank() != 0):
            return
        with self._warning():
            self.folder = steps.under(root) / program
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("[0-9][0-9]_*.py"):
                old.unlink()

    def stage(self, number: int, name: str, program: Program) -> None:
        """``<number>_<name>.py``."""
        self._write(f"{number:02}_{_slug(name)}.py", lambda: passes.print_program(program))

    def on_pass(self, number: int, each: Pass, program: Program, seconds: float) -> None:
        """A stage named after its pass."""
        self.stage(number, type(each).__name__, program)

    def report(self, report: Report) -> None:
        """``report.json``."""
        self._write("report.json", lambda: json.dumps(report.to_dict(), indent=2))

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self.folder is not None:
            content, path = text(), self.folder / name
            with self._warning():
                path.write_text(content, encoding="utf-8")

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Warn of an error of the file system, once for all programs of the step, and write no more of this one."""
        try:
            yield
        except OSError as error:
            self.folder = None
            if not self.steps.warned:
                self.steps.warned = True
                warn_user(f"the dump of {self.steps.name} is not complete: {error}. Training goes on")


def dump_stages(
    dump: Dump, captured: Program, partitioned: Program, pipeline: Sequence[Pass], final: Program, report: Report
) -> None:
    """Write all stages of a compiled program; the passes run once more, on a copy."""
    dump.stage(0, "capture", captured)
    dump.stage(1, "partition", partitioned)
    passes.run(partitioned, pipeline, on_stage=dump.on_pass, check=False)
    dump.stage(99, "lowered", final)
    dump.report(report)


def _take(root: Path, name: str) -> Path:
    """The first of ``name``, ``name-2``, ... that no other step of this process and no other running job has."""
    for number in count(1):
        folder = root / (name if number == 1 else f"{name}-{number}")
        if folder not in _taken and not _is_of_another_job(folder):
            folder.mkdir(exist_ok=True)
            (folder / _OWNER).write_text(_job(os.getpid()))
            _taken.add(folder)
            return folder
    raise AssertionError("there are always more numbers")


def _is_of_another_job(folder: Path) -> bool:
    """Whether a job writes there that may still run; of jobs on other hosts that cannot be known."""
    try:
        host, pid, _ = (folder / _OWNER).read_text().split(" ")
    except (FileNotFoundError, ValueError):
        return False
    return host != platform.node() or (folder / _OWNER).read_text() == _job(int(pid))


def _job(pid: int) -> str:
    """The host, the number and the start of a process; numbers are used again. Without a start it has ended."""
    try:
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        start = "" if Path("/proc/self").exists() or not _is_running(pid) else "running"
    return f"{platform.node()} {pid} {start}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process after the other choose; without locks in the file system, all at once."""
    try:
        import fcntl  # not on every system
    except ImportError:
        yield
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _slug(name: str) -> str:
    """``BucketAllReduce`` -> ``bucket_all_reduce``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
