"""Conditions on hyper-parameters, and on sizes of arguments, under which a program is valid, found while tracing.

A float of a parameter group, or a number of optimizer state, is an input of the graph. But where the optimizer branches
on it (``if weight_decay != 0``) the trace took one branch. Each such condition is evaluated again at every call; the
program runs only while all hold. So it is with a size of an argument for which a symbol stood in the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy  # type: ignore[import-untyped]  # comes with torch, has no types
import torch

from .._torch import ShapeEnv, symbolic_functions
from .sizes.size_symbols import LEAST, NO_SIZES, SizeSymbols
from .state_branches import Branch

# Torch's names for Python's own arithmetic on symbols; all else is evaluated by sympy, more slowly.
_AS_PYTHON: dict[str, Callable[..., Any]] = {
    "FloatPow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "PythonMod": operator.mod,
    "Mod": operator.mod,
    "ToFloat": float,
    "TruncToInt": int,
    "Max": max,
    "Min": min,
}
# Functions under which other numbers have other results, as far as a warning has to know.
_ONE_TO_ONE = {"ToFloat", "FloatPow", "PowByNatural", "FloatTrueDiv", "IntTrueDiv"}


@dataclass(frozen=True)
class HyperGuards:
    """Conditions on the values of all hyper-parameters of a call, in order, followed by its ``sizes``."""

    positions: list[tuple[int, ...]] = field(default_factory=list)  # of the values that each check takes
    checks: list[Callable[..., bool]] = field(default_factory=list)
    expressions: list[Any] = field(default_factory=list)  # (symbols, condition) of each check
    branches: list[Branch] = field(default_factory=list)  # on 0-dim state
    sizes: tuple[int, ...] = ()
    numbers: int = 0  # how many values there are before the sizes

    @classmethod
    def of(
        cls, shapes: ShapeEnv, symbols: Sequence[Any], branches: Sequence[Branch] = (), sizes: SizeSymbols = NO_SIZES
    ) -> HyperGuards:
        """The conditions that a trace has put on the symbols of its hyper-parameters, None for those without one."""
        position = {symbol: index for index, symbol in enumerate([*symbols, *sizes.symbols]) if symbol is not None}
        values = sizes.traced.values if sizes.symbols else ()
        guards = cls(branches=list(branches), sizes=values, numbers=len(symbols))
        for guard in shapes.guards:
            read = sorted((s for s in guard.expr.free_symbols if s in position), key=str)
            if read:
                guards.positions.append(tuple(position[s] for s in read))
                guards.expressions.append((read, guard.expr))
                printed = guard.expr.replace(_is_mod, lambda mod: sympy.Function("PythonMod")(*mod.args))
                guards.checks.append(sympy.lambdify(read, printed, [_AS_PYTHON, symbolic_functions, "math"]))
        return guards

    def hold(self, values: Sequence[Any]) -> bool:
        """Whether a call with these values takes the same branches."""
        values = [*values, *self.sizes]
        return all(
            bool(check(*(values[k] for k in positions)))
            for positions, check in zip(self.positions, self.checks, strict=True)
        )

    def at(self, sizes: Sequence[int]) -> HyperGuards | None:
        """The conditions that remain to be checked at these sizes; None if they do not admit the sizes."""
        rest = replace(self, sizes=tuple(sizes), positions=[], checks=[], expressions=[])
        for positions, check, expression in zip(self.positions, self.checks, self.expressions, strict=True):
            if any(k < self.numbers for k in positions):
                rest.positions.append(positions)
                rest.checks.append(check)
                rest.expressions.append(expression)
            elif not check(*(sizes[k - self.numbers] for k in positions)):
                return None
        return rest if min(sizes, default=LEAST) >= LEAST else None

    def failed(self, names: Sequence[str], values: Sequence[Any]) -> list[str]:
        """The numbers on which conditions are that these values do not meet, each with its value."""
        values, names = [*values, *self.sizes], [*names, *("a size" for _ in self.sizes)]
        failed = [
            positions
            for positions, check in zip(self.positions, self.checks, strict=True)
            if not check(*(values[k] for k in positions))
        ]
        return list(dict.fromkeys(f"{names[k]} = {values[k]}" for positions in failed for k in positions))

    def failed_for_state(self, names: Sequence[str], state: Sequence[torch.Tensor]) -> list[str]:
        """The 0-dim state on which branches are that this state does not take, each with its value."""
        live = dict(zip(names, state, strict=True))
        failed = [branch for branch in self.branches if not branch.holds(live)]
        if failed and not any(branch.reads for branch in failed):
            return ["other values of a tensor that is no argument"]
        return list(dict.fromkeys(f"{name} = {live[name].item()}" for branch in failed for name in branch.reads))

    def hold_for_state(self, names: Sequence[str], state: Sequence[torch.Tensor]) -> bool:
        """Whether a call with this state takes the same branches."""
        if not self.branches:
            return True
        live = dict(zip(names, state, strict=True))
        return all(branch.holds(live) for branch in self.branches)


def is_fixed(shapes: ShapeEnv, symbol: Any) -> bool:
    """Whether a trace has put a condition on a symbol that one value meets: ``k == 3``, not ``k % 4 == 0``."""
    conditions = [guard.expr for guard in shapes.guards if symbol in guard.expr.free_symbols]
    return any(isinstance(each, sympy.Eq) and _is_plain_arithmetic(each) for each in conditions)


def _is_mod(expression: Any) -> bool:
    """Whether it is torch's ``Mod``, which sympy prints as ``%`` without the parentheses that a sum in it needs."""
    return type(expression).__name__ == "Mod"


def _is_plain_arithmetic(condition: Any) -> bool:
    return {type(each).__name__ for each in condition.atoms(sympy.Function)} <= _ONE_TO_ONE
