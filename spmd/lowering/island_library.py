"""A library of islands' kernels: functions that ``ctypes`` calls, and the bytes of the file that has them."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._torch import cpp_library


@dataclass(frozen=True, eq=False)
class IslandLibrary:
    """``content``: what a later process loads, to run the same machine code."""

    content: bytes = field(repr=False)
    functions: Any

    @classmethod
    def compiled(cls, text: str) -> IslandLibrary:
        """Compile C++. Raises whatever the compiler does."""
        functions, path = cpp_library(text)
        return cls(Path(path).read_bytes(), functions)

    @classmethod
    def read(cls, content: bytes) -> IslandLibrary:
        """Load bytes that ``compiled`` had. Raises ``OSError`` if they are no library.

        They are loaded from a file of their own, which nobody else writes to and which goes at once: so what runs is
        what the caller has checked, whatever becomes of the file that it was read from.
        """
        with tempfile.TemporaryDirectory(prefix="spmd-kernels-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "kernels.so"
            path.write_bytes(content)
            return cls(content, ctypes.CDLL(str(path)))
