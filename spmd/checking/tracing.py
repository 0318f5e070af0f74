"""``Tracing``: a step in one mode, traced again behind each refusal, and once with each answer for a condition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from passes import SpmdError

from ..call.refusals import listening
from ..step_compiler import Rehearsal
from .noted import Noted, Site
from .refusal import Refusal, is_unexpected

_MOST = 64  # traces with other answers for conditions: each condition in a branch has two
_AGAIN = 200  # traces of one set of answers


@dataclass
class Tracing:
    """The traces of one step. ``rehearse`` makes its program; ``found``: what the first trace to its end made.

    ``refusals`` in the order in which traces passed them; ``unseen``: sentences on what was not looked at.
    """

    function: Callable[..., Any]
    rehearse: Callable[[], Rehearsal]
    noted: Noted
    found: Rehearsal | None = None
    refusals: dict[Site | str, Refusal] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)
    _looked_at: set[tuple[Site, bool]] = field(default_factory=set)

    def run(self) -> None:
        """Trace until no refusal is new, and no condition that was asked for has an answer that was not given."""
        pending: list[dict[Site, bool]] = [{}]
        for answers in pending:
            if len(pending) > _MOST:
                self._note_unseen(f"more than {_MOST} branches: those of conditions inside of branches")
                return
            self.noted.answers = dict(answers)
            self._to_the_end()
            for site, answer in [*self.noted.conditions.items()]:
                self._looked_at.add((site, answer))
                if (site, not answer) not in self._looked_at:
                    self._looked_at.add((site, not answer))
                    pending.append({**self.noted.answers, site: not answer})

    def _to_the_end(self) -> None:
        """Trace with one set of answers, until a trace comes to its end or to an error that none goes past."""
        for _ in range(_AGAIN):
            self.noted.begin()
            try:
                with listening(self.noted):
                    made = self.rehearse()
            except Exception as error:
                self._note_passed()
                if not self._goes_past(error):
                    return
            else:
                self._note_passed()
                self.found = self.found or made
                return
        self._note_unseen(f"what comes behind {_AGAIN} refusals")

    def _note_passed(self) -> None:
        for site, refusal in self.noted.those_passed():
            self.refusals.setdefault(site, refusal)

    def _goes_past(self, error: Exception) -> bool:
        """Note an error; returns whether another trace may come further."""
        site, refusal = self.noted.site_behind(error), Refusal.of(error, self.function)
        if site is not None and site not in self.noted.refusals:
            self.noted.add(site, refusal)
            self.refusals.setdefault(site, refusal)
            return True
        assumes = self.noted.passed or self.noted.conditions
        if assumes and (not isinstance(error, SpmdError) or is_unexpected(error)):
            self._note_own_error(error, refusal)
        else:
            self.refusals.setdefault(refusal.message, replace(refusal, goes_on=False))
            self._note_unseen(f"what comes behind {refusal.at}, which no trace goes past")
        return False

    def _note_own_error(self, error: Exception, refusal: Refusal) -> None:
        """Note an error of no refusal, to which a stand-in has led: it is the end of a branch."""
        if is_unexpected(error):
            self._note_unseen("what else compiling refuses, which ends in an error with the stand-ins of this trace")
            return
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self._note_unseen(f"what comes behind {refusal.at}, which raises with a stand-in for a value: {text}")

    def _note_unseen(self, sentence: str) -> None:
        if sentence not in self.unseen:
            self.unseen.append(sentence)
