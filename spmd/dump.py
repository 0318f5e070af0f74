"""Dumps: the graph of every stage as numbered text files, the report, and what the page of a step shows beside them.

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
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch.distributed as dist
from torch import fx

import passes
from passes import Pass, Program, Report
from passes.ir.bundle import Bundle, print_bundle
from passes.page.node_details import NodeDetails

from .interpreter.source_lines import warn_user
from .stages.schedule_files import schedule_text

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
        self.nodes = NodeDetails()
        self.captured: Program | None = None
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
        stage = stage_name(number, name)
        self._write(f"{stage}.py", lambda: passes.print_program(program))
        if self.folder is not None:
            self.nodes.note(stage, program)
            self._assignment(number, program)

    def _assignment(self, number: int, program: Program) -> None:
        """``assignment.txt``, beside the stage that was made by it."""
        if number == 0:
            self.captured = program
        elif self.captured is not None:
            for name, text in assignment_of(self.captured, program).items():
                self._write(name, lambda text=text: text)  # type: ignore[misc]
            self.captured = None

    def bundle(self, bundle: Bundle) -> None:
        """``bundle.txt``: channels, calls, and all programs; of a pipeline also its schedule, ``schedule.csv``."""
        self._write("bundle.txt", lambda: print_bundle(bundle))
        if bundle.axis:
            self._write("schedule.csv", lambda: schedule_text(bundle))

    def on_pass(self, number: int, each: Pass, program: Program, seconds: float) -> None:
        """A stage named after its pass."""
        self.stage(number, type(each).__name__, program)

    def report(self, make: Callable[[], Report]) -> None:
        """``report.json``, ``nodes.json`` and ``timeline.json``; ``kernels.cpp`` where there are islands."""
        if self.folder is not None:
            for name, text in _beside(make(), self.nodes).items():
                self._write(name, text)

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


def files_of(
    captured: Program, partitioned: Program, pipeline: Sequence[Pass], final: Program, report: Report
) -> dict[str, str]:
    """The files of a dump of a compiled program, by name; the passes run once more, on a copy."""
    texts, nodes = dict[str, str](), NodeDetails()

    def note(number: int, name: str, program: Program) -> None:
        stage = stage_name(number, name)
        texts[f"{stage}.py"] = passes.print_program(program)
        nodes.note(stage, program)

    visit_stages(note, captured, partitioned, pipeline, final)
    texts |= assignment_of(captured, partitioned)
    return texts | {name: text() for name, text in _beside(report, nodes).items()}


def assignment_of(captured: Program, partitioned: Program) -> dict[str, str]:
    """``assignment.txt``, with the op and the user's line of each node; nothing if the mode noted none."""
    if partitioned.assignment is None:
        return {}
    notes = {node.name: ", ".join(_origin(node)) for node in captured.graph.nodes}
    return {"assignment.txt": partitioned.assignment.text(notes)}


def _origin(node: fx.Node) -> Iterator[str]:
    yield str(node.target)
    yield from filter(None, [node.meta.get("source")])


def _beside(report: Report, nodes: NodeDetails) -> dict[str, Callable[[], str]]:
    """The files beside the stages, by name."""
    timelines = {"estimated": report.timeline} if report.timeline else {}
    kernels = {"kernels.cpp": lambda: report.kernels} if report.kernels else {}
    return kernels | {
        "report.json": lambda: json.dumps(report.to_dict(), indent=2),
        "nodes.json": nodes.to_text,
        "timeline.json": lambda: json.dumps({kind: asdict(each) for kind, each in timelines.items()}),
    }


OnProgram = Callable[[int, str, Program], None]  # the number of a stage, its name, and the program after it


def visit_stages(
    visit: OnProgram, captured: Program, partitioned: Program, pipeline: Sequence[Pass], final: Program
) -> None:
    """Show ``visit`` all stages of a compiled program; the passes run once more, on a copy."""
    visit(0, "capture", captured)
    visit(1, "partition", partitioned)
    passes.run(
        partitioned, pipeline, lambda number, each, program, _: visit(number, type(each).__name__, program), check=False
    )
    visit(99, "lowered", final)


def stage_name(number: int, name: str) -> str:
    """``06_bucket_all_reduce``."""
    return f"{number:02}_{_slug(name)}"


def stages_to_compare(stages: Sequence[str], wanted: Sequence[str]) -> tuple[str, str]:
    """Two of these stages: those that are wanted, or the one that is, and the one before it.

    A stage goes by its number (``"06"``), its name (``"bucket_all_reduce"``, ``"BucketAllReduce"``), or the beginning
    of its name. Raises ``ValueError``, with all names, for anything else.
    """
    if len(wanted) not in (1, 2):
        raise ValueError(f"expected one or two stages, got {', '.join(wanted) or 'none'}")
    found = [_stage(stages, each) for each in wanted]
    if len(found) == 2:
        return found[0], found[1]
    if found[0] == stages[0]:
        raise ValueError(f"{found[0]} is the first stage, and changes nothing: name a later one, or two")
    return stages[stages.index(found[0]) - 1], found[0]


def _stage(stages: Sequence[str], wanted: str) -> str:
    plain = wanted.replace("_", "").lower()
    numbered = [each for each in stages if wanted.isdigit() and int(each[:2]) == int(wanted)]
    named = [each for each in stages if each[3:].replace("_", "") == plain]
    found = numbered or named or [each for each in stages if each[3:].replace("_", "").startswith(plain)]
    if len(found) != 1:
        raise ValueError(
            f"there {'are several stages' if found else 'is no stage'} {wanted!r}: {', '.join(found or stages)}"
        )
    return found[0]


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
