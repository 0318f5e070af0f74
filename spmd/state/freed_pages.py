"""Give the kernel the pages that this process has freed, once a step is compiled and its state is where it stays."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def return_freed_pages() -> None:
    """Return all pages that the C library keeps of freed memory.

    Tracing, and state that moves (whole parameters to shards, tensors to flat storages), free blocks that are too small
    to go back by themselves: a fifth of the process's memory for a GPT of width 512. Only glibc keeps them so.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    """The C library's ``malloc_trim``; None in one that has none (musl, macOS)."""
    try:
        return getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # TypeError on Windows, which has no library of the process
        return None
