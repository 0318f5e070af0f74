"""Guess the first answer to a question, of which no call has shown the value yet.

A wrong guess is no wrong number: it costs a program. So it follows what steps ask for: values are finite, and no limit
is passed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from passes.ir.ops import Trait, has

aten = torch.ops.aten

_MOST = 4  # traces of other answers, where what a guess leads to cannot be traced
_EQUAL, _UNEQUAL = (aten.eq, operator.eq), (aten.ne, operator.ne)
_LESS, _MORE = (aten.lt, aten.le, operator.lt, operator.le), (aten.gt, aten.ge, operator.gt, operator.ge)
_AND = (aten.mul, aten.logical_and, aten.bitwise_and, aten.__and__)
_OR = (aten.add, aten.logical_or, aten.bitwise_or, aten.__or__)
_NOT = (aten.logical_not, aten.bitwise_not)
_OF_ONE = (aten.all, aten.any, aten.clone, aten._to_copy, aten.detach, aten.scalar_tensor)


def guess(node: Any) -> bool:
    """The answer to "is the value of this traced node true?", where its numbers are finite and below all limits."""
    op = _op_of(node)
    if op in (*_EQUAL, *_UNEQUAL):
        return _are_equal(*node.args[:2]) is (op in _EQUAL)
    if op in _LESS:
        return True
    if op in _AND or op in _OR:
        found = list(map(guess, node.args[:2]))
        return all(found) if op in _AND else any(found)
    if op in _NOT:
        return not guess(node.args[0])
    if op is aten.any and _op_of(node.args[0]) is aten.eq:
        return True  # some row chose this expert, say
    if op in _OF_ONE or (op is not None and has(node.target, Trait.VIEW)):
        return guess(node.args[0])
    return False


def compares(node: Any) -> bool:
    """Whether the question is one of a limit, whose guess says less than that of a number's being finite."""
    op = _op_of(node)
    if op in (*_LESS, *_MORE):
        return True
    asked = node.args[:2] if op in (*_AND, *_OR) else node.args[:1] if op in (*_NOT, *_OF_ONE) else ()
    return any(map(compares, asked))


def _op_of(node: Any) -> Any:
    """The op of a traced node, of tensors or of numbers."""
    is_call = isinstance(node, fx.Node) and node.op == "call_function"
    return getattr(node.target, "overloadpacket", node.target) if is_call else None


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values may be taken for equal: a number equals itself, and none is infinite."""
    if isinstance(other, float) and math.isinf(other):
        return False
    return one is other


class Backtracking:
    """Other guesses, where a trace raises behind some: no call may ever go there. ``values``: those of the next trace.

    The last guess is taken back first. ``first``: the error of the first trace, which is raised if all end in one.
    """

    def __init__(self) -> None:
        self.values: list[bool] = []
        self.first: Exception | None = None
        self._is_second: list[bool] = []  # of each, whether both answers have been tried
        self._traces = 0

    def goes_on(self, error: Exception, guessed: Sequence[bool]) -> bool:
        """Whether another trace may come to its end, after one that raised behind the answers ``guessed``."""
        self.first, self._traces = self.first or error, self._traces + 1
        del self.values[len(guessed) :], self._is_second[len(guessed) :]
        more = guessed[len(self.values) :]
        self.values += more
        self._is_second += [False] * len(more)
        while self._is_second and self._is_second[-1]:
            self.values.pop(), self._is_second.pop()
        if not self.values or self._traces == _MOST:
            return False
        self.values[-1], self._is_second[-1] = not self.values[-1], True
        return True
