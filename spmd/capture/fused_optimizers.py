"""Decompose fused optimizer ops (``torch._fused_adamw_``) into their arithmetic, tensor by tensor.

torch's own optimizers are traced without them; these are for steps that call them directly. The tensors of a list may
have different placements, so the ops are decomposed in the first trace, like ``_foreach``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from passes.ir.schemas import schema
from passes.update.formula_terms import evaluate
from passes.update.optimizer_kernels import COUNT, kernel_of, kernels

aten = torch.ops.aten

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "neg": operator.neg,
    "sqrt": torch.sqrt,
    "maximum": torch.maximum,
    "lerp": torch.lerp,
}


@cache
def fused_decompositions() -> dict[Any, Callable[..., None]]:
    """The decompositions, by op, for learning rates that are numbers and that are tensors."""
    found: dict[Any, Callable[..., None]] = {}
    for kernel in dict.fromkeys(schema(each.op).name.removeprefix("aten::") for each in kernels()):
        functional, packet = getattr(aten, kernel), getattr(aten, f"{kernel}_")
        for name in packet.overloads():
            found[getattr(packet, name)] = partial(_update, functional.default)
    return found


def _update(
    op: Any,
    *lists: Sequence[Tensor],
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    **options: Any,
) -> None:
    """Write what the kernel computes into its lists, unless some gradient is infinite; counts are those of this step.

    A scaled gradient is written back unscaled.
    """
    kernel = kernel_of(op, options)
    assert kernel is not None, f"no formula for {op} with {options}"

    def write(old: Tensor, new: Tensor) -> None:
        old.copy_(new if found_inf is None else torch.where(found_inf == 1, old, new))

    numbers = {unknown: options[name] for name, unknown in kernel.options.items() if isinstance(unknown, str)}
    by_name = {name: given for name, given in zip(kernel.lists, lists, strict=True) if given}
    for k in range(len(lists[0])):
        own = {name: given[k] for name, given in by_name.items()}
        if grad_scale is not None:
            unscaled = own["g"] / grad_scale
            write(own["g"], unscaled)
            own = own | {"g": unscaled}
        known = numbers | own
        if kernel.counts is not None:
            known |= {COUNT.operands[0]: own[kernel.counts].double()}
        new = evaluate(kernel.updates, known, _OPERATIONS)
        for name in new.keys() - {kernel.counts}:
            write(own[name], new[name])
