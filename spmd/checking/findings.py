"""``Findings``: what a check found in each mode, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .refusal import Refusal


@dataclass(frozen=True)
class InMode:
    """The findings of one mode.

    ``unseen``: what was not looked at; ``anew``: what compiles another program; ``whole``: what ranks gather whole;
    ``not_kept``: why no later process takes the program from the cache, empty where one does. The last three are known
    where the step ``is_compiled``: nothing is refused, and nothing else ended the trace.
    """

    mode: str
    refusals: tuple[Refusal, ...]
    unseen: tuple[str, ...]
    is_compiled: bool = False
    anew: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    not_kept: str = ""


@dataclass(frozen=True)
class Findings:
    """The findings of a check, mode by mode; true where each compiles."""

    step: str
    world: int
    modes: tuple[InMode, ...]

    def __bool__(self) -> bool:
        return all(each.is_compiled for each in self.modes)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """All refusals, each once, by file and line."""
        found = {(each.at, each.message): each for mode in self.modes for each in mode.refusals}
        return tuple(sorted(found.values(), key=lambda each: (each.file, each.line)))

    def modes_of(self, refusal: Refusal) -> tuple[str, ...]:
        """The modes that have a refusal."""
        return tuple(each.mode for each in self.modes if refusal.message in {own.message for own in each.refusals})

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return {"step": self.step, "world": self.world, "compiles": bool(self), "modes": list(map(asdict, self.modes))}
