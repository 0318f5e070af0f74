"""The user's line that writes a name, found in the code that ran while a step was traced."""

from __future__ import annotations

import dis
import os
import types
from collections.abc import Iterable, Iterator

from ..interpreter.source_lines import source_at

_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR"}


def line_naming(code: Iterable[types.CodeType], name: str) -> str:
    """``"train.py:12: self.h = h"`` for the line that stores ``name``, or else reads it; nothing if there is none."""
    found = [*_lines(code, name)]
    stores = [line for line, stores in found if stores]
    lines = stores or [line for line, _ in found[-1:]]
    return lines[0] if lines else ""


def _lines(code: Iterable[types.CodeType], name: str) -> Iterator[tuple[str, bool]]:
    """Each line that names it, and whether it is stored there."""
    for each in code:
        for instruction in dis.get_instructions(each):
            if instruction.argval == name and instruction.positions and instruction.positions.lineno:
                line, file = instruction.positions.lineno, each.co_filename
                yield f"{os.path.basename(file)}:{line}: {source_at(file, line)}", instruction.opname in _STORES
