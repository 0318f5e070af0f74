"""The graphs of all stages, small enough for a page: each statement once, and what each stage changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir.dump_diff import Change, Diff
from ..ir.dump_text import Memo, Statement, read_statements
from .node_details import Details, read_details

_KINDS = {"added": "+", "removed": "-", "changed": "~", "moved": ">"}


@dataclass
class _Table:
    """Different values, numbered in the order in which they were first seen."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def to_list(self) -> list[Any]:
        return list(self.numbers)


class StageTables:
    """Statements, texts and stages as plain data.

    A statement is ``[code, comment, phase, module, line, placement, role]``, where all but the code are numbers of
    ``texts``. A stage has its statements as runs ``[first, count]`` of numbers that follow each other, and its changes
    as ``[mark, statement before or -1, position after or where it was, note]``.
    """

    def __init__(self, stages: Mapping[str, str], details: str, did: Mapping[str, str]) -> None:
        self.statements, self.texts = _Table(), _Table({"": 0})
        self.stages: list[dict[str, Any]] = []
        memo: Memo = {}
        before: tuple[list[Statement], list[int]] | None = None
        for (name, text), each in zip(stages.items(), read_details(details, list(stages)), strict=True):
            read = _read(name, text, memo)
            numbers = [self._number(statement, each.get(statement.name, ("", ""))) for statement in read]
            changes = self._changes(before, read) if before else []
            self.stages.append({"name": name, "did": did.get(name[:2], ""), "runs": _runs(numbers), "changes": changes})
            before = read, numbers

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data, for JSON."""
        return {"statements": self.statements.to_list(), "texts": self.texts.to_list(), "stages": self.stages}

    def _number(self, statement: Statement, details: Details) -> int:
        line, placement = details
        code, _, comment = statement.text.partition("  # ")
        comment = comment if statement.role else _without_line(comment, line)
        parts = (comment, statement.phase, statement.module, line, placement, statement.role)
        return self.statements.number((code, *map(self.texts.number, parts)))

    def _changes(self, before: tuple[list[Statement], list[int]], after: list[Statement]) -> list[list[Any]]:
        old, numbers = before
        diff = Diff.of_statements(old, after)
        number_of = {id(statement): number for statement, number in zip(old, numbers, strict=True)}
        position_of = {id(statement): k for k, statement in enumerate(after)} | _where_they_were(old, after)
        places = [position_of[id(change.after or change.before)] for change in diff.changes]
        return [self._change(change, number_of, place) for change, place in zip(diff.changes, places, strict=True)]

    def _change(self, change: Change, number_of: Mapping[int, int], position: int) -> list[Any]:
        before = -1 if change.before is None else number_of[id(change.before)]
        return [_KINDS[change.kind], before, position, self.texts.number(change.note)]


def _where_they_were(before: Sequence[Statement], after: Sequence[Statement]) -> dict[int, int]:
    """For each statement of ``before``, the position behind that of the last one before it that is still there."""
    position_of = {(statement.role, statement.name): k for k, statement in enumerate(after)}
    found, position = dict[int, int](), 0
    for statement in before:
        found[id(statement)] = position
        position = position_of.get((statement.role, statement.name), position - 1) + 1
    return found


def _read(name: str, text: str, memo: Memo) -> list[Statement]:
    try:
        return read_statements(text, memo)
    except ValueError as error:
        raise ValueError(f"{name}.py is no printed program: {error}") from error


def _without_line(comment: str, line: str) -> str:
    """A comment without the source line at its end, which is shown by itself."""
    return comment.removesuffix(line).removesuffix("; ") if line else comment


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
