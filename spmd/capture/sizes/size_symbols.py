"""Sizes of dynamic dims in a trace: a symbol for each, or other numbers than those of the call."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..._torch import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv, constant_source
from ...call.dynamic_dims import DynamicSize
from ...call.inputs import BatchInput
from ...call.refusals import answer
from ...interpreter.source_lines import user_line

LEAST = 2  # torch takes a symbolic size for neither 0 nor 1, which broadcast


class NumberEnv(ShapeEnv):
    """A ``ShapeEnv`` that takes no condition any more once a trace has ended: no call would check it."""

    has_ended = False

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of a condition on symbols, which becomes a guard."""
        known = len(self.guards)
        try:
            result = super().evaluate_expr(*args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            return answer(error, *_stand_ins(error.cond))
        if self.has_ended and len(self.guards) > known:
            condition = self.guards.pop()
            raise AssertionError(f"the value of a number that each call reads was taken for known: {condition.expr}")
        return result


class SizeEnv(NumberEnv):
    """One with symbols for sizes, that knows the user's line at which it met each condition."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sizes: set[Any] = set()  # the symbols that may stand in shapes
        self.lines: list[str] = []  # of ``guards``

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of a condition on symbols, which becomes a guard."""
        result = super().evaluate_expr(*args, **kwargs)
        if len(self.guards) > len(self.lines):
            line = user_line(sys._getframe(1))
            self.lines += [line] * (len(self.guards) - len(self.lines))
        return result


def _stand_ins(condition: Any) -> tuple[Any, ...]:
    """Values for one that the step asks for: both of a condition, and one number."""
    if condition.is_Relational or condition.is_Boolean:
        return False, True
    return (1,) if condition.is_integer else (1.0,)


@dataclass(frozen=True)
class TracedSizes:
    """The dims of which a trace does not know the size, or knows another one than the call's.

    ``values``: of each size; ``are_symbolic``: whether symbols stand for them.
    """

    sizes: tuple[DynamicSize, ...] = ()
    values: tuple[int, ...] = ()
    are_symbolic: bool = True

    def shape_env(self) -> NumberEnv:
        """Make the shape environment of a trace, which holds its symbols and the conditions on them."""
        kind = SizeEnv if self.sizes and self.are_symbolic else NumberEnv
        return kind(allow_dynamic_output_shape_ops=False)  # a shape that depends on values raises at its line

    def symbols(self, shapes: ShapeEnv) -> SizeSymbols:
        """A symbol for each size."""
        if not isinstance(shapes, SizeEnv):
            return SizeSymbols(self, list(self.values))
        made, symbols = [], []
        for size, value in zip(self.sizes, self.values, strict=True):
            source = constant_source(size.name)
            symbols.append(shapes.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC))
            made.append(shapes.create_symintnode(symbols[-1], hint=value, source=source))
        shapes.sizes |= set(symbols)
        return SizeSymbols(self, made, symbols)


AS_CALLED = TracedSizes()
"""All sizes are those of the call."""


@dataclass(frozen=True)
class SizeSymbols:
    """The sizes of one trace: ``made`` stands in shapes, ``symbols`` in conditions and expressions; none if known."""

    traced: TracedSizes = AS_CALLED
    made: list[Any] = field(default_factory=list)
    symbols: list[Any] = field(default_factory=list)

    def shape(self, given: BatchInput) -> list[Any]:
        """The shape of an argument."""
        shape: list[Any] = list(given.shape)
        for size, value in zip(self.traced.sizes, self.made, strict=True):
            for argument, dim in size.dims:
                if argument == given.name:
                    shape[dim] = value
        return shape

    def fixed(self, shapes: ShapeEnv, numbers: Sequence[Any]) -> dict[DynamicSize, str]:
        """The sizes of which the trace needed the value, each with the user's line that did.

        A size that has to equal one of the ``numbers`` of the call (their symbols) is one: it follows from the call's.
        """
        found = {}
        tied = set().union(*(shapes.replace(number).free_symbols for number in numbers if number is not None))
        for size, symbol in zip(self.traced.sizes, self.symbols, strict=False):
            same = shapes.replace(symbol)
            if same.is_number or not tied.isdisjoint(same.free_symbols):
                conditions = zip(shapes.guards, getattr(shapes, "lines", ()), strict=False)
                lines = [line for guard, line in conditions if symbol in guard.expr.free_symbols]
                found[size] = lines[-1] if lines else ""
        return found


NO_SIZES = SizeSymbols()


def without(sizes: TracedSizes, fixed: Sequence[DynamicSize]) -> TracedSizes:
    """The sizes that are left."""
    kept = [(s, v) for s, v in zip(sizes.sizes, sizes.values, strict=True) if s not in fixed]
    return replace(sizes, sizes=tuple(s for s, _ in kept), values=tuple(v for _, v in kept))


def is_known(size: Any) -> bool:
    """Whether a size in a shape is a number, or follows from those of arguments."""
    return isinstance(size, int) or size.node.expr.free_symbols <= getattr(size.node.shape_env, "sizes", set())
