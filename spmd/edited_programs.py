"""``compile(program=FOLDER)``: final programs of a dump, which somebody may have edited, run in place of those made."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from passes import PassError, Program, print_program
from passes.ir.dump_text import read_statements
from passes.ir.read_program import read_program

from .interpreter.source_lines import warn_user

_FINAL = "99_lowered.py"


@dataclass(frozen=True)
class EditedPrograms:
    """The text of the last stage of each program in ``folder``, by the program's name there (``program-0``)."""

    folder: Path
    texts: dict[str, str]

    @classmethod
    def read(cls, folder: Any) -> EditedPrograms | None:
        """Read the programs of a step's folder in a dump; None for None. Raises ``ValueError`` where there are none."""
        if folder is None:
            return None
        path = Path(folder)
        texts = {each.parent.name: each.read_text(encoding="utf-8") for each in sorted(path.glob(f"*/{_FINAL}"))}
        if not texts:
            inside = ", ".join(sorted(each.name for each in path.iterdir())[:8]) if path.is_dir() else ""
            steps = ", ".join(sorted({str(each.parent.parent) for each in path.glob(f"*/*/{_FINAL}")}))
            hint = f": did you mean {steps}?" if steps else f"; it has {inside}" if inside else ""
            raise ValueError(
                f"expected program to be a step's folder in a dump, with program-0/{_FINAL} in it, got {path}{hint}"
            )
        return cls(path, texts)

    def of(self, program: Program) -> Program:
        """The program to run in place of the one that the passes made; that one, with a warning, where there is none.

        Raises ``PassError`` with the file and the line where it does not fit.
        """
        name = program.name.rpartition("/")[2]
        if name not in self.texts:
            warn_user(f"{program.name} runs as it was compiled: {self.folder} has {', '.join(self.texts)}, no {name}")
            return program
        path = self.folder / name / _FINAL
        try:
            edited, count = read_program(self.texts[name], program)
        except PassError as error:
            raise PassError(f"{path} does not fit {program.name}: {error}") from error
        which = "as the passes made it" if not count else f"{count} lines of it are not those that the passes made"
        note = f"the program is that of {path}, {which}"
        return replace(edited, history=[*edited.history, f"98 {note}"], notes=[*edited.notes, note])

    def describe(self, program: Program) -> str:
        """Digests that must be equal on all ranks: of the text read, and of the program that it replaces."""
        made = "\n".join(each.text for each in read_statements(print_program(program)))
        read = self.texts.get(program.name.rpartition("/")[2], "")
        return (
            f"compile(program=...): sha256 {_digest(read)}, in place of this rank's own program, sha256 {_digest(made)}"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
