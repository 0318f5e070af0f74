"""Conditions on numbers, as JSON: a tree of functions from a table, over the positions of symbols."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]  # comes with torch, has no types

from .not_cached import NotCachedError

_FUNCTIONS: dict[str, Callable[..., Any]] = {  # by sympy's name, and torch's for its own
    **{"Equality": operator.eq, "Unequality": operator.ne, "StrictLessThan": operator.lt, "LessThan": operator.le},
    **{"StrictGreaterThan": operator.gt, "GreaterThan": operator.ge},
    **{"And": lambda *each: all(each), "Or": lambda *each: any(each), "Not": operator.not_},
    **{"Add": lambda *each: sum(each), "Mul": lambda *each: math.prod(each), "Pow": operator.pow},
    **{"Max": max, "Min": min, "Abs": abs, "floor": math.floor, "ceiling": math.ceil},
    **{"FloatPow": operator.pow, "PowByNatural": operator.pow, "FloatTrueDiv": operator.truediv},
    **{"IntTrueDiv": operator.truediv, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv},
    **{"PythonMod": operator.mod, "Mod": operator.mod, "ToFloat": float, "TruncToInt": int},
}


def condition_to_data(symbols: Sequence[Any], condition: Any) -> Any:
    """The tree of a condition. Raises ``NotCachedError`` for a function that is in no table."""
    if condition in symbols:
        return ["symbol", list(symbols).index(condition)]
    if isinstance(condition, sympy.Integer):
        return ["int", int(condition)]
    if isinstance(condition, sympy.Float):
        if sympy.Float(float(condition)) != condition:
            raise NotCachedError(f"a condition has the number {condition}, which is no float")
        return ["float", float(condition).hex()]
    if isinstance(condition, sympy.Rational):
        return ["ratio", int(condition.p), int(condition.q)]
    if isinstance(condition, (bool, sympy.logic.boolalg.BooleanAtom)):
        return ["bool", bool(condition)]
    name = type(condition).__name__
    if name not in _FUNCTIONS or not condition.args:
        raise NotCachedError(f"it has a condition on numbers that no data holds, {condition}")
    return ["call", name, *(condition_to_data(symbols, each) for each in condition.args)]


def condition_from_data(data: Sequence[Any]) -> Callable[..., Any]:
    """The condition as a function of its symbols' values. Raises ``LookupError`` or ``ValueError`` for no tree."""
    kind, *of = data
    match kind:
        case "symbol":
            index: int = of[0]
            return lambda *values: values[index]
        case "int" | "bool":
            return lambda *_: of[0]
        case "float":
            number = float.fromhex(of[0])
            return lambda *_: number
        case "ratio":
            ratio = of[0] / of[1]
            return lambda *_: ratio
        case "call":
            function, inner = _FUNCTIONS[of[0]], list(map(condition_from_data, of[1:]))
            return lambda *values: function(*(each(*values) for each in inner))
    raise ValueError(f"no condition is written as {data}")
