"""Find the program that a dump has, and its stages."""

from __future__ import annotations

import json
from pathlib import Path

from passes import Report

_REPORT = "report.json"


def program_folder(folder: Path) -> Path:
    """The folder of one program: ``folder`` itself, or the only one somewhere in it that has stages.

    Those of the runs of a program, as of its micro-batches, have no report: it is in that of the program. Raises
    ``ValueError`` with what is there if there is none, or if there are several.
    """
    if not folder.is_dir():
        near = sorted(each.name for each in folder.parent.iterdir() if each.is_dir()) if folder.parent.is_dir() else []
        raise ValueError(f"there is no folder {folder}; {folder.parent} has {', '.join(near) or 'no folders'}")
    if stages_of(folder):
        return folder
    in_stages = {path.parent for path in folder.rglob("[0-9][0-9]_*.py")}
    found = sorted(each for each in in_stages if (each / _REPORT).is_file()) or sorted(in_stages)
    if len(found) != 1:
        listed = ", ".join(str(path) for path in found)
        raise ValueError(
            f"{folder} has several programs; name one: {listed}"
            if found
            else f"{folder} has no dump: let a step write one with spmd.compile(dump={str(folder)!r})"
        )
    return found[0]


def report_of(folder: Path) -> Report:
    """The report of the program in ``folder``. Raises ``ValueError`` for a file that is none."""
    path, program = folder / _REPORT, folder.name.rpartition("-")[0]
    if not path.is_file() and program and (runs := folder.with_name(program) / _REPORT).is_file():
        raise ValueError(f"{folder} is a run of the program in {runs.parent}, which has the report of all: name that")
    try:
        return Report.from_dict(json.loads(path.read_text()))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def reports_in(folder: Path) -> list[Report]:
    """The reports of the programs in ``folder``, in the order in which they were compiled.

    Raises ``ValueError`` where there is none.
    """
    found = sorted(folder.rglob(_REPORT), key=lambda path: (path.parent.parent, _number(path.parent.name)))
    return [report_of(path.parent) for path in found or [program_folder(folder) / _REPORT]]


def _number(name: str) -> int:
    """The last number in the name of a program's folder."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def stages_of(folder: Path) -> list[Path]:
    """The files of all stages, in order."""
    return sorted(folder.glob("[0-9][0-9]_*.py"))


def files_in(folder: Path) -> dict[str, str]:
    """The texts of the program in ``folder``, by the names of the files."""
    paths = [*stages_of(folder), *folder.glob("*.json")]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}
