"""How many rows of experts a program has room for, and what happens where a rank has more."""

from __future__ import annotations

from passes import Program

from ..options import Options

_ROOMS = (1.25, 1.5, 2.0, None)  # for rows of experts, as multiples of the ranks' mean; None: for all rows


class ExpertRoom:
    """The room for rows of experts in the next program of a step. ``outgrown``: calls that had more than that."""

    def __init__(self, options: Options) -> None:
        self._options, self.outgrown = options, 0
        self._times: float | None = _ROOMS[0]

    @property
    def times(self) -> float | None:
        """The room for rows of experts in the next program: for all where a call cannot begin anew with more."""
        return None if self._options.begins_once else self._times

    def notes(self, local: Program) -> list[str]:
        """A sentence for the report."""
        if local.room is None and not self.outgrown:
            return []
        room = f"{local.room} times the mean of its ranks" if local.room is not None else "all of them"
        calls = f"{self.outgrown} call{'s' * (self.outgrown != 1)}"
        return [f"rows of experts: a rank has room for {room}; {calls} had more, and ran again with more room"]

    def grow(self, program: Program, times: float) -> None:
        """Note that a call had ``times`` the rows that a program has room for."""
        assert program.room is not None, "a program with room for all rows is never outgrown"
        self.outgrown += 1
        needed = program.room * times
        self._times = next((room for room in _ROOMS if room is None or room >= needed), None)
