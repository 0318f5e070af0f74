"""Terms: arithmetic as trees of a few operations, the same for a written formula and for nodes of a graph.

A formula is a Python expression over ``unknown("p")`` and the like. ``solutions`` matches it against a value of a graph
and binds its unknowns, up to what changes only the order of rounding: commuted operands, a scalar that is copied to
fp64 or taken out of its tensor, ``addcmul`` for a product that is added, ``reciprocal(x) * y`` for ``y / x``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

Bindings = Mapping[str, Any]  # by unknown: a node or a number
Admits = Callable[[str, Any], bool]

_COMMUTE = {"add", "mul", "maximum"}


@dataclass(frozen=True)
class Term:
    """An operation and its operands: nodes, numbers and other terms. The operand of "unknown" is its name."""

    op: str
    operands: tuple[Any, ...]

    def __add__(self, other: Any) -> Term:
        return Term("add", (self, other))

    def __radd__(self, other: Any) -> Term:
        return Term("add", (other, self))

    def __sub__(self, other: Any) -> Term:
        return Term("sub", (self, other))

    def __rsub__(self, other: Any) -> Term:
        return Term("sub", (other, self))

    def __mul__(self, other: Any) -> Any:
        return _product(self, other)

    def __rmul__(self, other: Any) -> Any:
        return _product(other, self)

    def __truediv__(self, other: Any) -> Term:
        return Term("div", (self, other))

    def __rtruediv__(self, other: Any) -> Term:
        return Term("div", (other, self))

    def __pow__(self, other: Any) -> Term:
        return _power(self, other)

    def __rpow__(self, other: Any) -> Term:
        return _power(other, self)

    def __neg__(self) -> Term:
        return Term("neg", (self,))


def unknown(name: str) -> Term:
    """A variable of a formula."""
    return Term("unknown", (name,))


def sqrt(x: Any) -> Term:
    """The square root, elementwise."""
    return Term("sqrt", (x,))


def maximum(x: Any, y: Any) -> Term:
    """The larger of two, elementwise."""
    return Term("maximum", (x, y))


def lerp(start: Any, end: Any, weight: Any) -> Term:
    """``start + weight * (end - start)``."""
    return Term("lerp", (start, end, weight))


def evaluate(
    formulas: Mapping[str, Any], known: Bindings, operations: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """The values of formulas whose unknowns are ``known``, by ``operations`` under the names of those of terms."""
    values: dict[int, Any] = {}  # what formulas share is computed once

    def value(formula: Any) -> Any:
        if not isinstance(formula, Term):
            return formula
        if formula.op == "unknown":
            return known[formula.operands[0]]
        if id(formula) not in values:
            values[id(formula)] = operations[formula.op](*map(value, formula.operands))
        return values[id(formula)]

    return {name: value(formula) for name, formula in formulas.items()}


def has(formula: Any, op: str) -> bool:
    """Whether an operation is in a formula."""
    return isinstance(formula, Term) and (formula.op == op or any(has(each, op) for each in formula.operands))


def solutions(
    formula: Any, value: Any, found: Bindings, admits: Admits, rounded: Collection[fx.Node]
) -> Iterator[Bindings]:
    """Each set of bindings under which ``formula`` is ``value``: ``found``, and those of its other unknowns.

    ``admits(name, value)``: whether an unknown may be bound to a value. ``rounded``: nodes that may round a scalar to
    less than fp64; any other node that does is matched as a whole only.
    """
    if isinstance(formula, Term) and formula.op == "unknown":
        (name,) = formula.operands
        if name in found:
            if _same(found[name], value):
                yield found
        elif admits(name, value):
            yield {**found, name: value}
        return
    term = _as_term(value, rounded)
    if not isinstance(formula, Term):
        if _same(formula, term):
            yield found
    elif isinstance(term, (int, float)) and (inverse := _inverse(formula, term)) is not None:
        yield from solutions(*inverse, found, admits, rounded)
    elif isinstance(term, Term) and term.op == formula.op:
        for operands in permutations(term.operands) if term.op in _COMMUTE else [term.operands]:
            yield from _all(formula.operands, operands, found, admits, rounded)


def _inverse(formula: Term, value: float) -> tuple[Any, float] | None:
    """The operand that makes a formula ``-x`` or ``1 - x`` a number that was computed while tracing."""
    if formula.op == "neg":
        return formula.operands[0], -value
    return (formula.operands[1], 1 - value) if formula.op == "sub" and _same(formula.operands[0], 1) else None


def _all(
    formulas: tuple[Any, ...], values: tuple[Any, ...], found: Bindings, admits: Admits, rounded: Collection[fx.Node]
) -> Iterator[Bindings]:
    if not formulas:
        yield found
        return
    for first in solutions(formulas[0], values[0], found, admits, rounded):
        yield from _all(formulas[1:], values[1:], first, admits, rounded)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return float(one) == float(other)
    return one is other


def _as_term(value: Any, rounded: Collection[fx.Node]) -> Any:
    """The term of a node; a node of an unknown op is itself."""
    while isinstance(value, fx.Node):
        build = _TERMS.get(value.target) if value.op == "call_function" else None
        if build is None or (_rounds(value) and value not in rounded):
            return value
        try:
            value = build(*value.args, **value.kwargs)
        except TypeError:  # an option that terms do not have
            return value
    return value


def _rounds(node: fx.Node) -> bool:
    """Whether a scalar is computed in less than fp64, where a kernel computes it in fp64."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and not val.ndim and val.dtype is not torch.float64


def _product(x: Any, y: Any) -> Any:
    """``x * y``; one over something times ``y`` is ``y`` over that."""
    for inverse, other in ((x, y), (y, x)):
        term = _as_term(inverse, ())
        if isinstance(term, Term) and term.op == "div" and _same(term.operands[0], 1):
            return Term("div", (other, term.operands[1]))
    return Term("mul", (x, y))


def _scaled(x: Any, by: Any) -> Any:
    return x if _same(by, 1) else _product(x, by)


def _power(base: Any, exponent: Any) -> Term:
    if _same(exponent, 0.5):
        return Term("sqrt", (base,))
    return Term("mul", (base, base)) if _same(exponent, 2) else Term("pow", (base, exponent))


def _plain(x: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy to fp64 keeps the value."""
    if dtype is not torch.float64:
        raise TypeError("only a copy to fp64 keeps the value")
    return x


def _overwriting(old: fx.Node, new: fx.Node) -> fx.Node:
    """A value that is written over one of its own dtype stays as it is."""
    if old.meta["val"].dtype != new.meta["val"].dtype:
        raise TypeError("what is written is rounded")
    return new


_TERMS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: lambda x, y, alpha=1: Term("add", (x, _scaled(y, alpha))),
    aten.sub.Tensor: lambda x, y, alpha=1: Term("sub", (x, _scaled(y, alpha))),
    aten.rsub.Scalar: lambda x, y, alpha=1: Term("sub", (y, _scaled(x, alpha))),
    aten.mul.Tensor: _product,
    aten.div.Tensor: lambda x, y: Term("div", (x, y)),
    aten.reciprocal.default: lambda x: Term("div", (1, x)),
    aten.neg.default: lambda x: Term("neg", (x,)),
    aten.sqrt.default: sqrt,
    aten.pow.Scalar: _power,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.maximum.default: maximum,
    aten.lerp.Scalar: lerp,
    aten.addcmul.default: lambda x, y, z, value=1: Term("add", (x, _scaled(_product(y, z), value))),
    aten.addcdiv.default: lambda x, y, z, value=1: Term("add", (x, _scaled(Term("div", (y, z)), value))),
    aten.copy.default: _overwriting,
    aten._to_copy.default: _plain,
    aten._local_scalar_dense.default: lambda x: x,
    operator.add: lambda x, y: Term("add", (x, y)),
    operator.sub: lambda x, y: Term("sub", (x, y)),
    operator.mul: _product,
    operator.truediv: lambda x, y: Term("div", (x, y)),
    operator.neg: lambda x: Term("neg", (x,)),
    operator.pow: _power,
}
