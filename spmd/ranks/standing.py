"""Standing of a rank's state, compared between the ranks whenever they connect.

A call that fails in the middle may have updated state on one rank and not on another, or a part of it. Ranks whose
state differs for that reason, or is not whole, refuse to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes import RankFailedError


class StateError(RankFailedError):
    """State is not whole, or not that of the other ranks, since a call failed. ``standing``: of this rank."""

    def __init__(self, message: str, standing: Standing) -> None:
        super().__init__(message)
        self.standing = standing


@dataclass
class Standing:
    """``updates``: how many calls have updated state to their end. ``partly``: what left it partly updated, or ""."""

    updates: int = 0
    partly: str = ""

    def check(self, partly: str = "") -> None:
        """Raise ``StateError`` if state is partly updated; ``partly``: that of a call in particular."""
        if partly or self.partly:
            raise StateError(f"the state is {PARTLY}: {partly or self.partly}. {WAY_OUT}", self)

    def take(self, has_updated: bool) -> str:
        """Why state is partly updated, to be kept with the models it belongs to: all other state is whole.

        ``has_updated``: the other ranks count the update that was not ended here.
        """
        partly, self.partly = self.partly, ""
        self.updates += has_updated
        return partly

    def describe(self) -> str:
        """The standing in words."""
        return f"{PARTLY} ({self.partly})" if self.partly else f"whole, after {self.updates} updates"

    def restore(self, updates: int) -> None:
        """State is whole again, as after ``updates`` updates."""
        self.updates, self.partly = updates, ""


PARTLY = "partly updated"
WAY_OUT = "Call recover() of the step on all ranks, or load a checkpoint into model and optimizer on all ranks"
ALONE = Standing()
"""Of a rank that runs by itself."""


def check_equal(own: Standing, standings: Sequence[Standing], members: Sequence[int]) -> None:
    """Raise ``StateError`` unless the state of all ranks is whole and the same. ``own``: that of this rank."""
    if not any(each.partly for each in standings) and len({each.updates for each in standings}) <= 1:
        return
    described = [f"rank {member}: {each.describe()}" for member, each in zip(members, standings, strict=True)]
    why = "the state of the ranks differs, or is not whole, since a call failed"
    raise StateError(f"{why}: {'; '.join(described)}. {WAY_OUT}", own)
