"""``fuzz``: hypothesis draws choices; each becomes a file that is verified, and one that fails is shrunk."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from .choices import Choices
from .outcome import Outcome, quiet, run
from .shrink import shrunk
from .writer import write

_BITS, _NUMBERS = 7, 5
_MOST_STATEMENTS, _MOST_CHANGES = 5, 2

# A number as bits: of numbers, hypothesis chooses some more often because they stand in files that are imported.
_number = st.tuples(*[st.booleans()] * _BITS).map(lambda bits: int("".join(str(int(bit)) for bit in bits), 2))
_numbers = st.tuples(*[_number] * _NUMBERS)
_many = st.tuples(*[_number] * (3 * _NUMBERS))
_drawn = st.fixed_dictionaries(
    {
        "data": _numbers,
        "statements": st.lists(_numbers, max_size=_MOST_STATEMENTS).map(tuple),
        "changes": st.lists(_numbers, max_size=_MOST_CHANGES).map(tuple),
        "loss": _numbers,
        "training": _numbers,
        "optimizer": _numbers,
        "mode": _many,
        "passes": _numbers,
    }
)


@dataclass(frozen=True)
class Failure:
    """A step that fails: the file as it was shrunk, and how that ends."""

    path: Path
    outcome: Outcome


@dataclass
class Findings:
    """The results of all steps. ``refusals``: how many steps each sentence refused."""

    seed: int
    agreed: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    again: int = 0  # steps that fail as one before them

    @property
    def count(self) -> int:
        """The number of verified steps, without those that came about while one was shrunk."""
        return self.agreed + self.refusals.total() + len(self.failures) + self.again

    def summary(self) -> str:
        """One line."""
        failed = len(self.failures) + self.again
        refused = self.refusals.total()
        return f"{self.count} steps with seed {self.seed}: {self.agreed} agreed, {refused} refused, {failed} failed"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
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


Progress = Callable[[str, Findings], None]  # what is done now, and what was found so far


def fuzz(count: int, seed: int, folder: Path, progress: Progress = lambda *_: None, attempts: int = 150) -> Findings:
    """Verify ``count`` different random steps. For each kind of failure the smallest file is written into ``folder``.

    ``attempts``: runs to make one failure smaller.
    """
    options = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with quiet(), tempfile.TemporaryDirectory(prefix="fuzzed") as files:
        search = _Search(Findings(seed), folder, Path(files), progress, attempts)
        with suppress(KeyboardInterrupt):  # what was found until then counts
            seeded(seed)(options(given(_drawn)(search.verify)))()
    return search.findings


@dataclass
class _Search:
    """The property for hypothesis: verify the step of its choices, each different step once.

    ``files``: the folder for files while they run. ``verified``: the texts of all steps that were.
    """

    findings: Findings
    folder: Path
    files: Path
    progress: Progress
    attempts: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by text, also of what was tried to shrink one
    verified: set[str] = field(default_factory=set)

    def verify(self, drawn: dict[str, Any]) -> None:
        """Verify one step, and count it; shrink it if it fails as none before it."""
        choices = Choices(**drawn)
        script = write(choices)
        if script is None or script.text() in self.verified:
            reject()
        found = self.findings
        self.progress("verifying", found)
        self.verified.add(script.text())
        outcome = self._outcome(script.text())
        if outcome.kind == "agreed":
            found.agreed += 1
        elif outcome.kind == "refused":
            found.refusals[outcome.reason] += 1
        elif any(outcome.reason == each.outcome.reason for each in found.failures):
            found.again += 1
        else:
            found.failures.append(self._failure(choices, outcome.reason))

    def _outcome(self, text: str) -> Outcome:
        if text not in self.outcomes:
            path = self.files / f"fuzzed_{len(self.outcomes)}.py"  # one text for each name
            path.write_text(text)
            self.outcomes[text] = run(path)
            path.unlink()
        return self.outcomes[text]

    def _failure(self, choices: Choices, reason: str) -> Failure:
        """Shrink the step, as long as it fails in the same way, and write it down."""
        self.progress(f"shrinking: {reason}", self.findings)
        most = len(self.outcomes) + self.attempts

        def fails(simpler: Choices) -> bool:
            script = write(simpler)
            if script is None or (len(self.outcomes) >= most and script.text() not in self.outcomes):
                return False
            return self._outcome(script.text()).reason == reason

        smallest = write(shrunk(choices, fails))
        assert smallest is not None, "it failed"
        path = self.folder / f"seed-{self.findings.seed}-{len(self.findings.failures) + 1}.py"
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(smallest.text())
        return Failure(path, self._outcome(smallest.text()))
