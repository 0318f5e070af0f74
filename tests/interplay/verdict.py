"""What a difference of a row means for the tests: a fault of the change, or one that was there before."""

from __future__ import annotations

from pathlib import Path

from .array import described
from .dimensions import Row
from .earlier import commit_before, found_before, is_old
from .known import is_known as is_listed
from .known import known
from .seeds import VARIABLE, seed


def excuse(root: Path, row: Row, found: list[str]) -> str:
    """Why a row that differs is no fault of the change; empty if it is, or if nobody can say."""
    if is_listed(row, found, known()):
        return f"known.txt has it: {described(row)}: {found[0]}"
    commit = commit_before(root)
    before = None if commit is None else found_before(root, commit, row)
    if commit is None or before is None or not is_old(found, before):
        return ""
    return f"differs on {commit[:9]}, too: {described(row)}: {found[0]}"


def sentence(row: Row, found: list[str]) -> str:
    """What a test that fails says: how to run the row again, and what differs."""
    again = f'python -m tests.interplay --only "{described(row)}"  # {VARIABLE}={seed()}'
    return "\n".join([again, *found[:20]])
