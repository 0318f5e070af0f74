"""Values that ranks gather whole: for ops without a rule, rows of the batch that an op needs, matrices of an update."""

from __future__ import annotations

from passes import Program

_MARKS = ("has no rule, so every rank runs it whole", "are gathered", "reduces them whole", "is computed whole")


def gathered_whole(partitioned: Program) -> tuple[str, ...]:
    """The notes of a partition that say so, each with the line of the op."""
    return tuple(note for note in partitioned.notes if any(mark in note for mark in _MARKS))
