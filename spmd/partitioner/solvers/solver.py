"""``Solver``: the protocol of what decides how nodes are computed. ``docs/extend.md`` has an example."""

from __future__ import annotations

from typing import Any, Protocol

from ..assignment import Assignment


class Solver(Protocol):
    """An object that decides how the nodes of a program are computed."""

    def solve(self, problem: Any, given: Assignment) -> Assignment:
        """An assignment of all nodes of a ``spmd.Problem`` or of some, with all of ``given``; equal on all ranks."""
