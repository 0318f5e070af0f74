"""Derive which keys each row of a mask can see, from the positions that it compares.

``arange`` makes positions; sums and differences of them are linear in those of their dims; a comparison is false
outside of a band along two dims, and so is all that it is a condition of: ``(j <= i) & (j > i - 9) & same_document``.
What cannot be derived is unknown, and then a rank computes with all keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch

from ..base import Info, OpCall
from ..iota import moved_dim
from ..optional_ops import aten


@dataclass(frozen=True)
class Line:
    """Numbers that are ``offset`` and the position in ``plus``, less that in ``minus``; dims count from the last: -1.

    ``absolute``: their absolute values.
    """

    plus: int | None = None
    minus: int | None = None
    offset: float = 0
    absolute: bool = False


@dataclass(frozen=True)
class Band:
    """All elements are ``outside``, but where ``low <= position in column - position in row <= high``."""

    row: int
    column: int
    low: float
    high: float
    outside: float = False


Fact = Line | Band


def positions_of(call: OpCall) -> Fact | None:
    """Derive what is known of a result's elements by their positions; None if nothing is."""
    result, derive = call.results[0] if call.results else None, _BY_OP.get(call.target)
    return None if derive is None or result is None else derive(call, result)


def _known(value: Any) -> Fact | None:
    """The fact that is known of an operand's elements by their positions, or None."""
    if isinstance(value, Info):
        return Line(value.iota_dim - value.ndim) if value.iota_dim is not None else value.positions
    return Line(offset=value) if type(value) in (int, float) else None


def _operands(call: OpCall) -> tuple[Fact | None, ...]:
    return tuple(map(_known, call.args[:2]))


def _constant(call: OpCall, result: Info) -> Fact | None:
    return _known(call.arg("s", call.arg("fill_value")))


def _moved(call: OpCall, result: Info) -> Fact | None:
    """Views and copies have the same elements along other dims."""
    if len(call.operands) != 1:
        return None
    source, fact = call.operands[0], _known(call.operands[0])
    keeps = result.dtype == source.dtype or (result.dtype.is_floating_point and source.dtype.is_floating_point)
    if not keeps and not (isinstance(fact, Band) and fact.outside is False):
        return None  # numbers that are rounded, or too large
    moved: dict[str, Any] = {}
    for name in ("plus", "minus", "row", "column"):
        if (dim := getattr(fact, name, None)) is not None:
            before = dim + source.ndim
            after = moved_dim(call, source, before, result)
            if after is None or result.shape[after] != source.shape[before]:
                return None
            moved[name] = after - result.ndim
    return replace(fact, **moved) if fact is not None else None


def _sum(call: OpCall, result: Info, sign: int = 1) -> Fact | None:
    first, second = _operands(call)
    is_plain = "alpha" not in call.kwargs and result.dtype == torch.int64
    return _linear(first, second, sign) if is_plain else None


def _linear(first: Fact | None, second: Fact | None, sign: int) -> Line | None:
    """The sum of two lines, or their difference."""
    if not (isinstance(first, Line) and isinstance(second, Line)) or first.absolute or second.absolute:
        return None
    if not (float(first.offset).is_integer() and float(second.offset).is_integer()):
        return None
    plus, minus = (second.plus, second.minus) if sign == 1 else (second.minus, second.plus)
    added, taken = ([dim for dim in dims if dim is not None] for dims in ((first.plus, plus), (first.minus, minus)))
    if len(added) > 1 or len(taken) > 1 or (added and added == taken):
        return None
    first_of = [dims[0] if dims else None for dims in (added, taken)]
    return Line(first_of[0], first_of[1], first.offset + sign * second.offset)


def _difference(call: OpCall, result: Info) -> Fact | None:
    return _sum(call, result, -1)


def _absolute(call: OpCall, result: Info) -> Fact | None:
    fact = _known(call.args[0])
    return replace(fact, absolute=True) if isinstance(fact, Line) else None


def _comparison(low: float, high: float) -> Callable[[OpCall, Info], Fact | None]:
    """Of numbers of which the first, less the second, is to be between ``low`` and ``high``."""

    def derive(call: OpCall, result: Info) -> Fact | None:
        first, second = _operands(call)
        if not (isinstance(first, Line) and isinstance(second, Line)) or second.absolute:
            return None
        bounds = low, high
        if first.absolute:
            if low > -inf or second != Line(offset=second.offset) or not float(second.offset).is_integer():
                return None
            first, second, bounds = replace(first, absolute=False), Line(), _around(second.offset + high)
        less = _linear(first, second, -1)
        return _band(less, *bounds) if less is not None else None

    return derive


def _around(width: float) -> tuple[float, float]:
    return -width, width


def _band(less: Line, low: float, high: float) -> Band | None:
    if less.plus is None or less.minus is None:
        return None
    low, high = low - less.offset, high - less.offset
    if less.plus < less.minus:
        return Band(less.plus, less.minus, -high, -low)
    return Band(less.minus, less.plus, low, high)


def _both(call: OpCall, result: Info) -> Fact | None:
    bands = [each for each in _operands(call) if isinstance(each, Band)]
    found = [each for each in bands if each.outside is False]
    if result.dtype is not torch.bool or not found:
        return None
    one, other = found[0], found[-1]
    if (one.row, one.column) != (other.row, other.column):
        return one
    return replace(one, low=max(one.low, other.low), high=min(one.high, other.high))


def _either(call: OpCall, result: Info) -> Fact | None:
    first, last = _operands(call)
    if not (isinstance(first, Band) and isinstance(last, Band)) or result.dtype is not torch.bool:
        return None
    if replace(first, low=0, high=0) != replace(last, low=0, high=0) or first.outside is not False:
        return None
    return replace(first, low=min(first.low, last.low), high=max(first.high, last.high))


def _opposite(call: OpCall, result: Info) -> Fact | None:
    fact = _known(call.args[0])
    if not isinstance(fact, Band) or result.dtype is not torch.bool:
        return None
    return replace(fact, outside=not fact.outside)


def _filled(call: OpCall, result: Info) -> Fact | None:
    fact, value = _known(call.arg("mask")), _known(call.arg("value"))
    return _with(fact, value, where=True)


def _chosen(call: OpCall, result: Info) -> Fact | None:
    return _with(_known(call.arg("condition")), _known(call.arg("other")), where=False)


def _with(fact: Fact | None, value: Fact | None, where: bool) -> Fact | None:
    """A band outside of which elements have a number that is chosen where a condition is ``where``."""
    if not (isinstance(fact, Band) and isinstance(value, Line)) or fact.outside is not where:
        return None
    return replace(fact, outside=value.offset) if value == Line(offset=value.offset) else None


_MOVES = """_to_copy clone detach alias lift_fresh_copy contiguous expand expand_copy view _unsafe_view reshape
unsqueeze squeeze squeeze.dim squeeze.dims slice.Tensor"""
_BY_OP: dict[Any, Callable[[OpCall, Info], Fact | None]] = {
    **dict.fromkeys(aten(*_MOVES.split()), _moved),
    **dict.fromkeys(aten("scalar_tensor", "full"), _constant),
    **dict.fromkeys(aten("add.Tensor", "add.Scalar"), _sum),
    **dict.fromkeys(aten("sub.Tensor", "sub.Scalar"), _difference),
    **dict.fromkeys(aten("abs"), _absolute),
    **dict.fromkeys(aten("le.Tensor", "le.Scalar"), _comparison(-inf, 0)),
    **dict.fromkeys(aten("lt.Tensor", "lt.Scalar"), _comparison(-inf, -1)),
    **dict.fromkeys(aten("ge.Tensor", "ge.Scalar"), _comparison(0, inf)),
    **dict.fromkeys(aten("gt.Tensor", "gt.Scalar"), _comparison(1, inf)),
    **dict.fromkeys(aten("eq.Tensor", "eq.Scalar"), _comparison(0, 0)),
    **dict.fromkeys(aten("bitwise_and.Tensor", "logical_and", "__and__.Tensor"), _both),
    **dict.fromkeys(aten("bitwise_or.Tensor", "logical_or", "__or__.Tensor"), _either),
    **dict.fromkeys(aten("bitwise_not", "logical_not"), _opposite),
    **dict.fromkeys(aten("masked_fill.Scalar", "masked_fill.Tensor"), _filled),
    **dict.fromkeys(aten("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar"), _chosen),
}
