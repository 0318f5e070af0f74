"""The table of rules, and the decorators that add to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from passes.ir.ops import Trait, has

from .._torch import OpOverload
from .base import Localize, OpCall, Option, Rule

Op = OpOverload

RULES: dict[Op, Rule] = {}
LOCALIZE: dict[Op, Localize] = {}
NAMED: dict[str, Rule] = {}
"""Rules for ops of other libraries, by name: the ops exist once such a library is imported."""
TAGGED: dict[torch.Tag, Rule] = {}
"""Rules for all aten ops with a tag, where the op has none of its own."""


def rule(*ops: Op) -> Callable[[Rule], Rule]:
    """Register a rule for ``ops``."""

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, f"{op} has a rule already"
            RULES[op] = function
        return function

    return register


def named(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for ops of other libraries."""

    def register(function: Rule) -> Rule:
        NAMED.update(dict.fromkeys(names, function))
        return function

    return register


def whole(*ops: Op) -> None:
    """Register ``ops`` that cannot be split: every rank runs them on whole operands."""
    rule(*ops)(_nothing)


def _nothing(call: OpCall) -> list[Option]:
    return []


def tagged(tag: torch.Tag) -> Callable[[Rule], Rule]:
    """Register a rule for every functional aten op that torch gives ``tag``."""

    def register(function: Rule) -> Rule:
        assert tag not in TAGGED, f"{tag} has a rule already"
        TAGGED[tag] = function
        return function

    return register


def localize(*ops: Op) -> Callable[[Localize], Localize]:
    """Register a function that replaces global sizes among the arguments of ``ops`` by local ones."""

    def register(function: Localize) -> Localize:
        for op in ops:
            assert op not in LOCALIZE, f"{op} has a localize function already"
            LOCALIZE[op] = function
        return function

    return register


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
