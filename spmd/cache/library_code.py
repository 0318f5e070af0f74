"""Code of installed libraries that entries take as it is: its files are compared, and not what it could read.

Their registries, caches of functions and imports inside of functions would keep each step that calls them from having
an entry. What such code reads of a model, a configuration or a module is recorded and compared like all else; of the
environment, the variables that its files name.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..interpreter.foreign_code import is_library_file

LIBRARIES = ("transformers", "huggingface_hub")  # their models were tried: they start warm as they train
_VARIABLE = re.compile(r"""["']([A-Z][A-Z0-9_]{2,})["']""")


def is_of_library(module: str | None) -> bool:
    """Whether a module is one of these libraries, as installed: not a clone, which its user edits."""
    root = str(module).partition(".")[0]
    return root in LIBRARIES and is_library_file(str(getattr(sys.modules.get(root), "__file__", "")))


def variables_named(code: Iterable[types.CodeType]) -> list[list[Any]]:
    """The variables of the environment that the libraries' files among those of ``code`` name, with their values.

    None for one that is not set. Of a file all names count: what its functions keep in caches, or made of a variable
    when they were imported, was read by no code that ran.
    """
    roots = [str(sys.modules[root].__file__) for root in LIBRARIES if is_of_library(root)]
    folders = tuple(f"{Path(file).parent}{os.sep}" for file in roots)
    files = {each.co_filename for each in code if each.co_filename.startswith(folders)}
    names = {name for file in files for name in _VARIABLE.findall(Path(file).read_text(encoding="utf-8"))}
    return [[name, os.environ.get(name)] for name in sorted(names)]
