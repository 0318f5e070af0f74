"""The table of rules, and the decorators that add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from passes.ir.ops import Trait, has

from .._torch import OpOverload
from .base import Localize, OpCall, Option, Rule

Op = OpOverload
_Key = TypeVar("_Key")
_Function = TypeVar("_Function")

RULES: dict[Op, Rule] = {}
LOCALIZE: dict[Op, Localize] = {}
NAMED: dict[str, Rule] = {}
"""Rules for ops of other libraries, by name: the ops exist once such a library is imported."""
TAGGED: dict[torch.Tag, Rule] = {}
"""Rules for all aten ops with a tag, where the op has none of its own."""


def _adding_to(table: dict[_Key, _Function], keys: Iterable[_Key]) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        for key in keys:
            assert key not in table, f"{key} is registered already"
            table[key] = function
        return function

    return register


def rule(*ops: Op) -> Callable[[Rule], Rule]:
    """Register a rule for ``ops``."""
    return _adding_to(RULES, ops)


def named(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ops of other libraries."""
    return _adding_to(NAMED, names)


def whole(*ops: Op) -> None:
    """Register ``ops`` that cannot be split: every rank runs them on whole operands."""
    rule(*ops)(_nothing)


def _nothing(call: OpCall) -> list[Option]:
    """Nothing may be split: every rank runs the op on whole operands."""
    return []


def is_whole(rule: Rule) -> bool:
    """Whether a rule is that of ops that cannot be split."""
    return rule is _nothing


def tagged(tag: torch.Tag) -> Callable[[Rule], Rule]:
    """Register a rule for every functional aten op that torch gives ``tag``."""
    return _adding_to(TAGGED, [tag])


def localize(*ops: Op) -> Callable[[Localize], Localize]:
    """Register a function that replaces global sizes among the arguments of ``ops`` by local ones."""
    return _adding_to(LOCALIZE, ops)


def rule_of(op: Any) -> Rule | None:
    """The rule of ``op`` or of one of its tags, or None."""
    if op in RULES or not isinstance(op, OpOverload):
        return RULES.get(op)
    # Only tags of aten ops: on a user's op a tag may promise less than the rule relies on.
    if op.namespace != "aten" or has(op, Trait.MUTABLE):
        return NAMED.get(op.name())
    return next((TAGGED[tag] for tag in op.tags if tag in TAGGED), None)


def localize_of(op: Any) -> Localize | None:
    """The function that makes the arguments of ``op`` local, or None if they hold no sizes."""
    return LOCALIZE.get(op)
