"""Rewrites of a global program before it is divided: ops that no rule can describe become others that have rules."""

from __future__ import annotations

from passes import Program

from .counted import count_truths
from .joined_cuts import view_joined_cuts
from .masked_scatter import lower_masked_scatters


def prepared(program: Program, parts: int = 1) -> Program:
    """The program to divide; ``parts``: the equal parts of the batch that need no rows of each other, if known.

    ``program`` is left as it is.
    """
    return count_truths(lower_masked_scatters(view_joined_cuts(program), parts))
