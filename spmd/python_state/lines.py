"""The user's line that writes a name, found in the code that ran while a step was traced."""

from __future__ import annotations

import dis
import os
import types
from collections.abc import Iterable, Iterator

from ..interpreter.source_lines import source_at

_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR"}
_ITEM_STORES = {"STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR"}
_NAME, _ITEM = "name", "item"


def line_naming(code: Iterable[types.CodeType], name: str) -> str:
    """``"train.py:12: self.h = h"`` for the line that stores ``name``, else an entry of it (``self.h[0] = h``).

    If there is neither, for the last that reads it; nothing if none does.
    """
    found = [*_lines(code, name)]
    lines = [line for line, stores in found if stores == _NAME] or [line for line, stores in found if stores == _ITEM]
    return next(iter(lines or [line for line, _ in found[-1:]]), "")


def _lines(code: Iterable[types.CodeType], name: str) -> Iterator[tuple[str, str]]:
    """Each line that names it, and what is stored there: ``_NAME``, ``_ITEM`` or nothing."""
    for each in code:
        instructions = [*dis.get_instructions(each)]
        of_items = {x.positions.lineno for x in instructions if x.opname in _ITEM_STORES and x.positions}
        for instruction in instructions:
            if instruction.argval == name and instruction.positions and instruction.positions.lineno:
                line, file = instruction.positions.lineno, each.co_filename
                stores = _NAME if instruction.opname in _STORES else _ITEM if line in of_items else ""
                yield f"{os.path.basename(file)}:{line}: {source_at(file, line)}", stores
