"""Guess the first answer to a question, of which no call has shown the value yet.

A wrong guess is no wrong number: it costs a program. So it follows what steps ask for: values are finite, and no limit
is passed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from passes.ir.ops import Trait, has

aten = torch.ops.aten

_LESS = (aten.lt, aten.le)
_AND = (aten.mul, aten.logical_and, aten.bitwise_and, aten.__and__)
_OR = (aten.add, aten.logical_or, aten.bitwise_or, aten.__or__)
_NOT = (aten.logical_not, aten.bitwise_not)
_OF_ONE = (aten.all, aten.any, aten.clone, aten._to_copy, aten.detach)


def guess(node: Any) -> bool:
    """The answer to "is the value of this traced node true?", where its numbers are finite and below all limits."""
    op = getattr(node.target, "overloadpacket", None) if isinstance(node, fx.Node) else None
    if op in (aten.eq, aten.ne):
        return _are_equal(*node.args[:2]) is (op is aten.eq)
    if op in _LESS:
        return True
    if op in _AND or op in _OR:
        found = list(map(guess, node.args[:2]))
        return all(found) if op in _AND else any(found)
    if op in _NOT:
        return not guess(node.args[0])
    if op in _OF_ONE or (op is not None and has(node.target, Trait.VIEW)):
        return guess(node.args[0])
    return False


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values may be taken for equal: a number equals itself, and none is infinite."""
    if isinstance(other, float) and math.isinf(other):
        return False
    return one is other
