"""``Noted``: the refusals that traces have come to, which the next trace goes past, with stand-ins for values.

A refusal is recognized by its site: the user's line that runs, and the message. Which error of a trace was one, and
where it stood, is noted when it is raised: what reaches the end of the trace may be its explanation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from .._torch import disable_modes, tree_map
from ..interpreter.source_lines import user_frame
from .refusal import Refusal

_OTHERS = (0, 1_000_000, -1_000_000)  # numbers that end loops
_IN_A_ROW = 4  # times that a condition, or an iterator, gives one answer in a row: then a loop ends


@dataclass(frozen=True)
class Site:
    """A place at which a step is refused. ``at``: of the instruction; ``text``: the message, if it stays the same."""

    kind: str
    file: str
    line: int
    at: int
    text: str

    @classmethod
    def of(cls, error: Exception, frame: FrameType | None) -> Site:
        """The site of an error that is about to be raised at ``frame``."""
        is_torchs = type(error).__module__.startswith("torch")  # whose messages number its symbols
        text = "" if is_torchs else str(error)
        frame = user_frame(frame)
        if frame is None:
            return cls(type(error).__name__, "", 0, 0, text)
        return cls(type(error).__name__, frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, text)


@dataclass
class Noted:
    """The sites so far, with their refusals; and of the trace that runs, those that it passed, and its answers.

    ``answers``: for the conditions that are not to be false, by site; ``values``: those that could be taken once only.
    """

    refusals: dict[Site, Refusal] = field(default_factory=dict)
    answers: dict[Site, bool] = field(default_factory=dict)
    passed: dict[Site, None] = field(default_factory=dict)
    conditions: dict[Site, bool] = field(default_factory=dict)  # those that the trace asked for, with the first answer
    _raised: list[tuple[Exception, Site]] = field(default_factory=list)
    _asked: dict[Site, int] = field(default_factory=dict)
    _values: dict[Site, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin another trace."""
        self.passed, self.conditions, self._raised, self._asked = {}, {}, [], {}

    def passes(self, error: Exception) -> bool:
        """Whether the trace goes on behind ``error``; else it is raised, and its site is kept in mind."""
        site = Site.of(error, sys._getframe(1))
        if site in self.refusals:
            self.passed[site] = None
            return True
        self._raised.append((error, site))
        return False

    def chosen(self, error: Exception, answers: tuple[Any, ...]) -> Any:
        """The answer for a value. A condition gets the one that is asked for, but in a loop not for ever."""
        site = Site.of(error, sys._getframe(1))
        times = self._asked[site] = self._asked.get(site, 0) + 1
        if len(answers) == 1:
            return self._number(error, answers[0], times)
        wanted = self.answers.get(site, False)
        self.conditions.setdefault(site, wanted)
        return wanted if times % (_IN_A_ROW + 1) else not wanted

    @staticmethod
    def _number(error: Exception, first: Any, times: int) -> Any:
        """The number that is given for a value: others after some times, since a loop may wait for a smaller one."""
        turn = (times - 1) // _IN_A_ROW
        if turn >= 2 * len(_OTHERS):
            raise error
        return type(first)((first, *_OTHERS)[turn % (1 + len(_OTHERS))])

    def kept(self, error: Exception, make: Callable[[], Any]) -> Any:
        """Return what was taken once, with zeros in the place of tensors; a loop gets it a few times."""
        site = Site.of(error, sys._getframe(1))
        times = self._asked[site] = self._asked.get(site, 0) + 1
        if times > _IN_A_ROW:
            raise StopIteration
        if site not in self._values:
            with disable_modes():  # an iterator computes with tensors of its own
                self._values[site] = make()
        return tree_map(_zeros, self._values[site])

    def site_behind(self, error: Exception) -> Site | None:
        """The site of the refusal that ``error`` is, or explains; None if it is none that can be gone past."""
        found: BaseException | None = error
        while found is not None:
            for raised, site in self._raised:
                if raised is found:
                    return site
            found = found.__cause__ or found.__context__
        return None

    def add(self, site: Site, refusal: Refusal) -> None:
        """Note a refusal, which later traces go past."""
        self.refusals[site] = replace(refusal, goes_on=True)

    def those_passed(self) -> Iterator[tuple[Site, Refusal]]:
        """The refusals that the trace went past."""
        return ((site, self.refusals[site]) for site in self.passed)


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value
