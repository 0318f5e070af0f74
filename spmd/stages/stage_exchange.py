"""Exchange text between the ranks of one stage, which have the same programs, in exchanges that all ranks take part in.

Passes decide for each program of a rank by itself, so that ranks with fewer programs take part with nothing at the end.
"""

from __future__ import annotations

from collections import Counter

from passes import Program
from passes.ir.bundle import Bundle

from ..ranks.consensus import AllGatherText


class StageExchange:
    """From this rank's text to those of the ranks with its stages. ``each``: the exchanges for one program."""

    def __init__(self, program: Program, each: int, all_gather: AllGatherText) -> None:
        bundle: Bundle = program.stages
        self._own, self._all_gather = str(bundle.coordinate_of(program)), all_gather
        programs = Counter(k for role in bundle.programs for k in bundle.coordinates(role))
        self._left = each * max(programs.values())

    def __call__(self, text: str) -> list[str]:
        """The texts of these ranks, in the order of the mesh."""
        self._left -= 1
        found = [each.partition(" ") for each in self._all_gather(f"{self._own} {text}")]
        return [text for stage, _, text in found if stage == self._own]

    def end(self) -> None:
        """Take part in what ranks with more programs have still to exchange."""
        while self._left > 0:
            self("")
