"""Arithmetic as a tree of few words, the same for a formula that is written down and for nodes of a graph.

A formula is a Python expression over ``unknown("p")`` and the like. ``solutions`` finds what each unknown stands for in
a value of a graph, modulo what changes nothing but the order of rounding: commuted operands, a scalar that is copied to
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

Found = Mapping[str, Any]  # by unknown: a node or a number
Admits = Callable[[str, Any], bool]

_COMMUTE = {"add", "mul", "maximum"}


@dataclass(frozen=True)
class Term:
    """A word and what it is said of: nodes, numbers and other terms. An unknown is a word about its own name."""

    word: str
    of: tuple[Any, ...]

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
    """What a formula leaves open."""
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


def solutions(formula: Any, value: Any, found: Found, admits: Admits, rounded: Collection[fx.Node]) -> Iterator[Found]:
    """Each way in which ``value`` is ``formula``: ``found``, and what its other unknowns stand for.

    ``admits(name, value)`` says what an unknown may stand for. ``rounded``: nodes that may round a scalar to less than
    fp64; any other node that does is not looked into.
    """
    if isinstance(formula, Term) and formula.word == "unknown":
        (name,) = formula.of
        if name in found:
            if _same(found[name], value):
                yield found
        elif admits(name, value):
            yield {**found, name: value}
        return
    said = _said(value, rounded)
    if not isinstance(formula, Term):
        if _same(formula, said):
            yield found
    elif isinstance(said, (int, float)) and (inverse := _inverse(formula, said)) is not None:
        yield from solutions(*inverse, found, admits, rounded)
    elif isinstance(said, Term) and said.word == formula.word:
        for operands in permutations(said.of) if said.word in _COMMUTE else [said.of]:
            yield from _all(formula.of, operands, found, admits, rounded)


def _inverse(formula: Term, value: float) -> tuple[Any, float] | None:
    """A number that was computed while tracing, as what it was computed from: of ``-x`` and ``1 - x``."""
    if formula.word == "neg":
        return formula.of[0], -value
    return (formula.of[1], 1 - value) if formula.word == "sub" and _same(formula.of[0], 1) else None


def _all(
    formulas: tuple[Any, ...], values: tuple[Any, ...], found: Found, admits: Admits, rounded: Collection[fx.Node]
) -> Iterator[Found]:
    if not formulas:
        yield found
        return
    for first in solutions(formulas[0], values[0], found, admits, rounded):
        yield from _all(formulas[1:], values[1:], first, admits, rounded)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return float(one) == float(other)
    return one is other


def _said(value: Any, rounded: Collection[fx.Node]) -> Any:
    """What a node says in words; a node that says nothing we know is itself."""
    while isinstance(value, fx.Node):
        words = _WORDS.get(value.target) if value.op == "call_function" else None
        if words is None or (_rounds(value) and value not in rounded):
            return value
        try:
            value = words(*value.args, **value.kwargs)
        except TypeError:  # an option that words do not have
            return value
    return value


def _rounds(node: fx.Node) -> bool:
    """Whether a scalar is computed in less than fp64, where a kernel computes it in fp64."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and not val.ndim and val.dtype is not torch.float64


def _product(x: Any, y: Any) -> Any:
    """``x * y``; one over something times ``y`` is ``y`` over that."""
    for inverse, other in ((x, y), (y, x)):
        said = _said(inverse, ())
        if isinstance(said, Term) and said.word == "div" and _same(said.of[0], 1):
            return Term("div", (other, said.of[1]))
    return Term("mul", (x, y))


def _scaled(x: Any, by: Any) -> Any:
    return x if _same(by, 1) else _product(x, by)


def _power(base: Any, exponent: Any) -> Term:
    if _same(exponent, 0.5):
        return Term("sqrt", (base,))
    return Term("mul", (base, base)) if _same(exponent, 2) else Term("pow", (base, exponent))


def _plain(x: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy in fp64 is what it copies."""
    if dtype is not torch.float64:
        raise TypeError("only a copy to fp64 keeps the value")
    return x


def _in_its_place(old: fx.Node, new: fx.Node) -> fx.Node:
    """What is written over a value of its own dtype stays what it is."""
    if old.meta["val"].dtype != new.meta["val"].dtype:
        raise TypeError("what is written is rounded")
    return new


_WORDS: dict[Any, Callable[..., Any]] = {
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
    aten.copy.default: _in_its_place,
    aten._to_copy.default: _plain,
    aten._local_scalar_dense.default: lambda x: x,
    operator.add: lambda x, y: Term("add", (x, y)),
    operator.sub: lambda x, y: Term("sub", (x, y)),
    operator.mul: _product,
    operator.truediv: lambda x, y: Term("div", (x, y)),
    operator.neg: lambda x: Term("neg", (x,)),
    operator.pow: _power,
}
