"""The fused kernels of optimizers on symbols: their formulas, in the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from passes.ir.schemas import schema
from passes.update.formula_terms import evaluate, has
from passes.update.optimizer_kernels import COUNT, Kernel, kernel_of, kernels

from ..symbols import minus, number, over, plus, power, symbol, times

UPDATES = {schema(kernel.op).name for kernel in kernels()}
"""The names of the ops."""
WITH_ROOTS = {schema(kernel.op).name for kernel in kernels() if has(kernel.updates["p"], "sqrt")}
"""Those whose new parameters are not of the field."""

_FOR_SCALERS = ("grad_scale", "found_inf")
_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": lambda x, y: plus(symbol(x), symbol(y)),
    "sub": lambda x, y: minus(symbol(x), symbol(y)),
    "mul": lambda x, y: times(symbol(x), symbol(y)),
    "div": lambda x, y: over(symbol(x), symbol(y)),
    "neg": lambda x: minus(torch.tensor(0), x),
    "pow": lambda x, y: power(symbol(x), symbol(y)),
    "sqrt": lambda x: power(x, torch.tensor(number(0.5))),
    "lerp": lambda start, end, weight: plus(start, times(weight, minus(end, start))),
}


def described(op: Any, options: Mapping[str, Any]) -> Kernel | str:
    """The kernel that an op is with these options, or the part of them that is not described."""
    given = [name for name in (*_FOR_SCALERS, "amsgrad") if options.get(name) not in (None, False)]
    kernel = kernel_of(op, options)
    if given or kernel is None:
        return f"it is not described with {' and '.join(given) or dict(options)}"
    return kernel


def new_values(kernel: Kernel, entry: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Values that the kernel writes, by the name of the list; ``entry``: symbols of one parameter and its state."""
    known = dict(entry) | {
        unknown: symbol(options[name]) for name, unknown in kernel.options.items() if isinstance(unknown, str)
    }
    if kernel.counts is not None:
        known[COUNT.operands[0]] = entry[kernel.counts]
    written = {name: formula for name, formula in kernel.updates.items() if name != kernel.counts}
    return evaluate(written, known, _OPERATIONS)
