"""Errors that all ranks raise: uncaught, the first rank prints its traceback, and the others a line each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

PRINTED_BY = "_spmd_printed_by"  # an attribute of such an error: the rank that prints it


def leave_to_first_rank(error: Exception, first: int, rank: int) -> None:
    """Let this ``rank`` print one line for ``error``, which rank ``first`` raises, too, if nothing catches it."""
    vars(error)[PRINTED_BY] = first
    if not isinstance(sys.excepthook, partial) or sys.excepthook.func is not _print:
        sys.excepthook = partial(_print, sys.excepthook, rank)


def _print(
    otherwise: Callable[..., Any],
    rank: int,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    first = vars(error).get(PRINTED_BY)
    if first is None:
        otherwise(kind, error, trace)
    else:
        print(f"rank {rank} ends with the {kind.__name__} that rank {first} prints", file=sys.stderr)
