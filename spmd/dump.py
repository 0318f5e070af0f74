"""Dumps: the graph of every stage as numbered text files, and the report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

import passes
from passes import Pass, Program, Report

OnStage = Callable[[int, Pass, Program, float], None]


class Dump:
    """Writes one program's stages into ``folder``; without a folder, and on ranks other than 0, it writes nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if dist.is_initialized() and dist.get_rank() != 0 else folder
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("[0-9][0-9]_*.py"):
                old.unlink()

    @classmethod
    def of(cls, folder: Path | None, name: str) -> Dump:
        """The dump of the program called ``name`` (``step/program-0``), under ``folder``."""
        return cls(folder / name if folder is not None else None)

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
            (self.folder / name).write_text(text())


def dump_stages(
    dump: Dump, captured: Program, partitioned: Program, pipeline: Sequence[Pass], final: Program, report: Report
) -> None:
    """Write all stages of a compiled program; the passes run once more, on a copy."""
    dump.stage(0, "capture", captured)
    dump.stage(1, "partition", partitioned)
    passes.run(partitioned, pipeline, on_stage=dump.on_pass, check=False)
    dump.stage(99, "lowered", final)
    dump.report(report)


def _slug(name: str) -> str:
    """``BucketAllReduce`` -> ``bucket_all_reduce``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
