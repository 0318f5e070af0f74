"""The one table of rules, and how users add to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .base import Localize, Rule

Op = torch._ops.OpOverload

RULES: dict[Op, Rule] = {}
LOCALIZE: dict[Op, Localize] = {}


def rule(*ops: Op) -> Callable[[Rule], Rule]:
    """Register a rule for ``ops``."""

    def register(function: Rule) -> Rule:
        for op in ops:
            assert op not in RULES, f"{op} has a rule already"
            RULES[op] = function
        return function

    return register


def localize(*ops: Op) -> Callable[[Localize], Localize]:
    """Register how the arguments of ``ops`` that hold global sizes become local."""

    def register(function: Localize) -> Localize:
        for op in ops:
            LOCALIZE[op] = function
        return function

    return register


def rule_of(op: Any) -> Rule | None:
    """The rule of ``op``, or None."""
    return RULES.get(op)


def known(ops: Iterable[Op]) -> set[Op]:
    """Those of ``ops`` that have a rule."""
    return {op for op in ops if op in RULES}
