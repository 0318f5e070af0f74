"""The rows of the table: each rule once, with the ops that it is for, where it is written, and its letters.

A rule is a function, or a table of labels with the function that reads it. The letters are those of its example.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
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
    function: Any = inspect.unwrap(rule.func if isinstance(rule, partial) else rule)
    text, whole = next((found[name] for name in names if name in (found := examples())), None), is_whole(rule)
    return Row(
        rule=rule,
        ops=tuple(names),
        name=function.__name__,
        file=_shown_path(Path(function.__code__.co_filename)),
        line=function.__code__.co_firstlineno,
        summary=(inspect.getdoc(function) or "").partition("\n")[0],
        whole=whole,
        of_user=any(name_of(op) in names for op in registered),
        example=None if whole else text,
        claims=claims_of(rule, call_of(text, RANKS)) if text is not None and not whole else None,
    )


@cache
def examples() -> dict[str, str]:
    """The examples by the name of their op, without those of ops that this torch lacks."""
    named = {text.partition("(")[0]: text for text in EXAMPLES}
    return {name: text for name, text in named.items() if is_there(name)}


def example_of(name: str, rule: Rule) -> str | None:
    """The example of an op; without one of its own, that of another op of its rule, if it takes the same arguments."""
    if name in examples() or not is_there(name):
        return examples().get(name)
    others = [examples()[other] for other, each in ruled_ops().items() if each is rule and other in examples()]
    return next((text for other in others if is_taken(text := f"{name}({other.partition('(')[2]}")), None)


def _shown_path(path: Path) -> str:
    """From the folder that holds the package, for files of it."""
    root = Path(__file__).parents[3]
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
