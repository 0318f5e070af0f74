"""``fuzz``: hypothesis draws choices, each is written and verified, and a failure is shrunk to a small file."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from .choices import Choices
from .outcome import Outcome, run
from .writer import write

_BITS, _NUMBERS = 7, 5
_MOST_STATEMENTS, _MOST_CHANGES = 8, 2
_MOST_SHRINKS = 300  # runs to make one failure smaller

# A number as bits: of numbers, hypothesis chooses some more often because they stand in files that are imported.
_number = st.tuples(*[st.booleans()] * _BITS).map(lambda bits: int("".join(str(int(bit)) for bit in bits), 2))
_numbers = st.tuples(*[_number] * _NUMBERS)
_many = st.tuples(*[_number] * (3 * _NUMBERS))
_drawn = st.fixed_dictionaries(
    {
        "data": _numbers,
        "statements": st.lists(_numbers, max_size=_MOST_STATEMENTS),
        "changes": st.lists(_numbers, max_size=_MOST_CHANGES),
        "loss": _numbers,
        "training": _numbers,
        "optimizer": _numbers,
        "mode": _many,
        "passes": _numbers,
    }
)

Progress = Callable[[str, int], None]  # what is done, and how many steps are verified


@dataclass(frozen=True)
class Failure:
    """A step that fails: the file as it was shrunk, and how that ends."""

    path: Path
    outcome: Outcome


@dataclass
class Findings:
    """What came of all steps. ``refusals``: how many steps each sentence refused."""

    seed: int
    agreed: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    again: int = 0  # steps that fail as one before them

    @property
    def count(self) -> int:
        """How many steps were verified, without those that came about while one was shrunk."""
        return self.agreed + self.refusals.total() + len(self.failures) + self.again

    def summary(self) -> str:
        """One line."""
        failed = len(self.failures) + self.again
        refused = self.refusals.total()
        return f"{self.count} steps with seed {self.seed}: {self.agreed} agreed, {refused} refused, {failed} failed"

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "seed": self.seed,
            "count": self.count,
            "agreed": self.agreed,
            "refused": dict(self.refusals.most_common()),
            "failed": len(self.failures) + self.again,
            "failures": [
                {"file": str(each.path), "reason": each.outcome.reason, "details": each.outcome.details}
                for each in self.failures
            ],
        }


def fuzz(count: int, seed: int, folder: Path, progress: Progress = lambda *_: None) -> Findings:
    """Verify ``count`` random steps. For each kind of failure the smallest file is written into ``folder``."""
    findings = Findings(seed)
    with tempfile.TemporaryDirectory(prefix="fuzzed") as files:
        while findings.count < count:
            found = len(findings.failures)
            _Round(findings, count, folder, Path(files), progress).run()
            if len(findings.failures) == found:
                break
    return findings


class _Found(Exception):
    """A step that fails."""


@dataclass
class _Round:
    """One run of hypothesis, which ends with the first failure of a new kind."""

    findings: Findings
    count: int
    folder: Path
    files: Path
    progress: Progress
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    reason: str = ""  # of the failure that is being shrunk
    smallest: str = ""  # the last text that fails so
    _shrunk: int = 0  # runs that shrinking took

    def run(self) -> None:
        """Verify steps until one fails that none before did; shrink it, and write it down."""
        number = len(self.findings.failures)
        options = settings(
            max_examples=self.count - self.findings.count,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        try:
            seeded(1000 * self.findings.seed + number)(options(given(_drawn)(self._verify)))()
        except _Found:
            path = self.folder / f"seed-{self.findings.seed}-{number + 1}.py"
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(self.smallest)
            self.findings.failures.append(Failure(path, self.outcomes[self.smallest]))

    def _verify(self, drawn: dict[str, Any]) -> None:
        """Verify one step; raises ``_Found`` where it fails."""
        script = write(Choices(**drawn))
        if script is None:
            reject()
        text = script.text()
        outcome = self.outcomes.get(text)
        if outcome is None:
            if self._shrunk > _MOST_SHRINKS:
                return
            outcome = self.outcomes[text] = self._run(text)
        if self.reason:
            self._shrink(text, outcome)
        else:
            self._count(text, outcome)

    def _run(self, text: str) -> Outcome:
        if self.reason:
            self._shrunk += 1
            self.progress(f"shrinking {self.reason}", self.findings.count + 1)
        path = self.files / f"fuzzed_{self.findings.count}_{len(self.outcomes)}.py"  # a name has one text
        path.write_text(text)
        try:
            return run(path)
        finally:
            path.unlink()

    def _count(self, text: str, outcome: Outcome) -> None:
        self.progress("verifying", self.findings.count + 1)
        if outcome.kind == "agreed":
            self.findings.agreed += 1
        elif outcome.kind == "refused":
            self.findings.refusals[outcome.reason] += 1
        elif any(outcome.reason == each.outcome.reason for each in self.findings.failures):
            self.findings.again += 1
        else:
            self.reason = outcome.reason
            self._shrink(text, outcome)

    def _shrink(self, text: str, outcome: Outcome) -> None:
        """Hypothesis tries smaller choices as long as the step fails in the same way; the last one is the smallest."""
        if outcome.reason == self.reason:
            self.smallest = text
            raise _Found
