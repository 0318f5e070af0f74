"""The errors users see. Each message is a sentence: what was expected, what came, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """The end of a sentence on a wrong name: those of ``known`` that are close to it, or nothing.

    A name with another number in it ("zero3") was meant so, and what it names may be close to another one.
    """
    if not isinstance(given, str):
        return ""
    text = given.rstrip("0123456789").casefold()
    by_case = {name.casefold(): name for name in known if name == text or name.rstrip("0123456789") != text}
    close = [f'"{by_case[each]}"' for each in get_close_matches(given.casefold(), by_case, 2)]
    return f": did you mean {' or '.join(close)}?" if close else ""


class SpmdError(Exception):
    """Base of every error this project raises on purpose, but for wrong arguments (``TypeError``, ``ValueError``)."""


class CaptureError(SpmdError):
    """The train step cannot be traced into one graph."""


class PlacementError(SpmdError):
    """A tensor cannot be placed on the mesh as asked."""


class PartitionError(SpmdError):
    """The global graph could not be expanded into one rank's share."""


class PassError(SpmdError):
    """A pass, a transform or a backend broke the program."""


class MemoryBudgetError(SpmdError):
    """The step needs more memory than it may have; says how much it needs."""


class RankMismatchError(SpmdError):
    """Ranks came with different programs, shapes or arguments."""


class RankFailedError(RankMismatchError):
    """A call failed on another rank; says on which, why, and whether state is whole."""
