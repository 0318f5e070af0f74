"""The difference of two programs that were printed: what is new, gone, changed or moved, value by value.

Values are matched by what they are. Two that compute the same from matched values are one, those with one name first;
of the others, those with one name are one that has changed. Passes keep the names of the values that they leave alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from .dump_text import Statement, read_statements

_STYLES = {"-": "red", "+": "green", "~": "yellow", ">": "cyan"}


@dataclass(frozen=True)
class Change:
    """One difference. ``kind``: "added", "removed", "changed" or "moved"; ``before``, ``after``: the two statements.

    ``note``: what a changed value reads now, or which value a moved one follows.
    """

    kind: str
    before: Statement | None
    after: Statement | None
    note: str = ""

    @property
    def statement(self) -> Statement:
        """The newer one there is."""
        found = self.after or self.before
        assert found is not None, "a change has a statement"
        return found


@dataclass(frozen=True)
class Diff:
    """The differences between the programs ``names``, in the order of the second; true if there are any."""

    names: tuple[str, str]
    changes: tuple[Change, ...]
    kept: int

    @classmethod
    def of_texts(cls, before: str, after: str, names: tuple[str, str] = ("before", "after")) -> Diff:
        """Of the texts of ``print_program``. Raises ``ValueError``, with the name, for a text that is none."""
        read = []
        for name, text in zip(names, (before, after), strict=True):
            try:
                read.append(read_statements(text))
            except ValueError as error:
                raise ValueError(f"{name} is no printed program: {error}") from error
        return cls.of_statements(read[0], read[1], names)

    @classmethod
    def of_statements(
        cls, before: Sequence[Statement], after: Sequence[Statement], names: tuple[str, str] = ("before", "after")
    ) -> Diff:
        """Of two programs that were read; the changes have these very statements."""
        changes = list(_changes(before, after))
        kept = len(after) - sum(change.after is not None for change in changes)
        return cls(names, tuple(changes), kept)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def count(self, kind: str) -> int:
        """How many changes are of a kind."""
        return sum(change.kind == kind for change in self.changes)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        changes = [
            {
                "kind": change.kind,
                "name": change.statement.name,
                "where": change.statement.where,
                "before": change.before.text if change.before else None,
                "after": change.after.text if change.after else None,
                "note": change.note,
            }
            for change in self.changes
        ]
        return {"before": self.names[0], "after": self.names[1], "kept": self.kept, "changes": changes}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.names[0]} -> {self.names[1]}: {self._summary()}", style="bold")
        where = ""
        for change in self.changes:
            if change.statement.where != where:
                where = change.statement.where
                yield Text(where or "(no phase)", style="dim")
            for mark, text in _lines(change):
                yield Text(f"  {mark} {text}", style=_STYLES[mark])

    def _summary(self) -> str:
        kinds = ("removed", "added", "changed", "moved")
        found = [f"{self.count(kind)} {kind}" for kind in kinds if self.count(kind)]
        return ", ".join([*(found or ["nothing differs"]), f"{self.kept} as before"])

    def __str__(self) -> str:
        console = Console(width=400, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _lines(change: Change) -> Iterator[tuple[str, str]]:
    """The marks and texts that show a change."""
    if change.note:
        yield ("~" if change.kind == "changed" else ">"), f"{change.statement.name}: {change.note}"
        return
    if change.before is not None:
        yield "-", change.before.text
    if change.after is not None:
        yield "+", change.after.text


def _changes(before: Sequence[Statement], after: Sequence[Statement]) -> Iterator[Change]:
    matches = _matches(before, after)  # from the numbers of the second's statements to those of the first's
    stays = _longest_run([matches[k] for k in sorted(matches)])
    gone = iter(sorted(set(range(len(before))) - set(matches.values())))
    next_gone, reached = next(gone, None), -1
    for k, new in enumerate(after):
        old = matches.get(k)
        if old in stays:
            reached = max(reached, old)
        while next_gone is not None and next_gone < reached:
            yield Change("removed", before[next_gone], None)
            next_gone = next(gone, None)
        if old is None:
            yield Change("added", None, new)
        elif (change := _changed(before[old], new)) is not None:
            yield change
        elif old not in stays:
            yield Change("moved", before[old], new, f"now follows {after[k - 1].name}" if k else "now comes first")
    while next_gone is not None:
        yield Change("removed", before[next_gone], None)
        next_gone = next(gone, None)


def _changed(before: Statement, after: Statement) -> Change | None:
    """The change of a value that is in both, if it is one."""
    if before.computes != after.computes:
        return Change("changed", before, after)
    if before.reads == after.reads:
        return None
    pairs = [(old, new) for old, new in zip(before.reads, after.reads, strict=True) if old != new]
    now, then = (", ".join(dict.fromkeys(names)) for names in ((new for _, new in pairs), (old for old, _ in pairs)))
    return Change("changed", before, after, f"reads {now} instead of {then}")


def _matches(before: Sequence[Statement], after: Sequence[Statement]) -> dict[int, int]:
    """The statement of ``before`` that each one of ``after`` is, by number."""
    candidates: dict[Any, list[int]] = defaultdict(list)
    for k, old in enumerate(before):
        candidates[old.role, old.computes, old.reads].append(k)
    by_name = {(old.role, old.name): k for k, old in enumerate(before)}
    names = {old.name for old in before}
    found: dict[int, int] = {}
    old_names: dict[str, str] = {}  # of values of ``after`` that ``before`` has, perhaps by another name
    taken = set[int]()
    for k, new in enumerate(after):
        reads = tuple(old_names.get(name, name if name in names else "") for name in new.reads)
        equal = [c for c in candidates[new.role, new.computes, reads] if c not in taken]
        same = [c for c in equal if before[c].name == new.name] or equal
        if same:
            found[k] = same[0]
            taken.add(same[0])
            old_names[new.name] = before[same[0]].name
    for k, new in enumerate(after):
        namesake = by_name.get((new.role, new.name))
        if k not in found and namesake is not None and namesake not in taken:
            found[k] = namesake
            taken.add(namesake)
    return found


def _longest_run(numbers: Sequence[int]) -> set[int]:
    """A longest ascending subsequence: what keeps its order (Fredman 1975)."""
    tails: list[int] = []  # the place of the last number of the best run of each length
    previous: dict[int, int | None] = {}
    for place, number in enumerate(numbers):
        length = bisect_left(tails, number, key=numbers.__getitem__)
        previous[place] = tails[length - 1] if length else None
        tails[length : length + 1] = [place]
    run, place_or_none = set[int](), tails[-1] if tails else None
    while place_or_none is not None:
        run.add(numbers[place_or_none])
        place_or_none = previous[place_or_none]
    return run
