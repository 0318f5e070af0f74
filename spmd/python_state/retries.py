"""``Retries``: the end of a loop that does its work once more, for a reason that the time before has found."""

from __future__ import annotations

from collections.abc import Iterable

from passes import SpmdError

_REPEATED = 4  # times that no reason is new: two things of a program may have one name
_MOST = 1000  # a program has so many dicts and lists at most that a step comes to one after the other


class Retries:
    """Counts the times and keeps the reasons. A loop whose reasons come again makes what it finds itself.

    ``what`` is done once more, such as ``"the step is traced"``; ``advice``: what a user can do about it.
    """

    def __init__(self, what: str, advice: str, error: type[SpmdError]) -> None:
        self._what, self._advice, self._error = what, advice, error
        self._known: set[str] = set()
        self._times = self._repeated = 0

    def note(self, reasons: Iterable[str]) -> None:
        """Do it once more for these reasons. Raises the error where they have come before, or too many have."""
        found = dict.fromkeys(reasons)
        self._times += 1
        self._repeated += found.keys() <= self._known
        self._known |= found.keys()
        if self._repeated > _REPEATED or self._times > _MOST:
            shown = ", and ".join([*found][:3]) or "nothing that has a name"
            raise self._error(
                f"{self._what} once more, the {self._times}th time, because of {shown}, and would be again without "
                f"end. {self._advice}"
            )
