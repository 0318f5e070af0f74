"""The rows of the table: each rule once, with the ops that it is for, where it is written, and its letters.

A rule is a function, or a table of labels with the function that reads it. The letters are those of its example.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..base import Rule
from ..registry import is_whole
from ..user_rules import registered
from .claims import Claims, claims_of
from .example_call import call_of, is_taken
from .examples import EXAMPLES
from .names import is_there, name_of, ruled_ops

RANKS = 2
EXAMPLE_OF = {text.partition("(")[0]: text for text in EXAMPLES}


@dataclass(frozen=True)
class Row:
    """A rule. ``claims``: what it says of ``example``, None if it has none; ``whole``: whether it never splits."""

    rule: Rule = field(repr=False)
    ops: tuple[str, ...]
    name: str
    file: str
    line: int
    summary: str
    whole: bool
    of_user: bool
    example: str | None
    claims: Claims | None

    @property
    def letters(self) -> str:
        """Its letters in the example, "whole" if nothing may be split, or nothing where it has none."""
        return "whole" if self.whole else (self.claims.notation if self.claims is not None else "")


def rows(ops: Mapping[str, Rule] | None = None) -> list[Row]:
    """A row for each rule of ``ops`` (all that have one), in the order of the table."""
    of_rule: dict[Rule, list[str]] = {}
    for name, rule in (ruled_ops() if ops is None else ops).items():
        of_rule.setdefault(rule, []).append(name)
    return [row_of(rule, names) for rule, names in of_rule.items()]


def row_of(rule: Rule, names: list[str]) -> Row:
    """The row of one rule, on the example of the first of its ops that has one."""
    function, whole = _written(rule), is_whole(rule)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    text = None if whole else next((EXAMPLE_OF[name] for name in names if name in EXAMPLE_OF and is_there(name)), None)
    return Row(
        rule=rule,
        ops=tuple(names),
        name=getattr(function, "__name__", type(function).__name__),
        file=_shown_path(Path(code.co_filename)) if code is not None else "",
        line=code.co_firstlineno if code is not None else 0,
        summary=(inspect.getdoc(function) or "").partition("\n")[0],
        whole=whole,
        of_user=any(name_of(op) in names for op in registered),
        example=text,
        claims=claims_of(rule, call_of(text, RANKS)) if text is not None else None,
    )


def _written(rule: Any) -> Any:
    """The function that somebody wrote: that of a user behind our own, or one that takes a row of a table of labels."""
    while isinstance(rule, partial) or hasattr(rule, "__wrapped__"):
        rule = rule.func if isinstance(rule, partial) else rule.__wrapped__
    return rule


def example_of(name: str, rule: Rule) -> str | None:
    """The example of an op; without one of its own, that of another op of its rule, if it takes the same arguments."""
    if name in EXAMPLE_OF or not is_there(name):
        return EXAMPLE_OF.get(name) if is_there(name) else None
    others = [EXAMPLE_OF[other] for other, each in ruled_ops().items() if each is rule and other in EXAMPLE_OF]
    return next((text for other in others if is_taken(text := f"{name}({other.partition('(')[2]}")), None)


def _shown_path(path: Path) -> str:
    """From the folder that holds the package, for files of it."""
    root = Path(__file__).parents[3]
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
