"""The formulas of torch's fused kernels, each against its kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.update.formula_terms import Term
from passes.update.optimizer_kernels import Kernel, kernels

_TENSORS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "lerp": lambda start, end, weight: start + weight * (end - start),
    "neg": torch.neg,
    "sqrt": torch.sqrt,
}


def value_of(formula: Any, known: dict[str, torch.Tensor]) -> torch.Tensor:
    """The formula's value, in fp64."""
    if not isinstance(formula, Term):
        return torch.tensor(formula, dtype=torch.float64)
    if formula.op == "unknown":
        return known[formula.operands[0]].double()
    return _TENSORS[formula.op](*(value_of(each, known) for each in formula.operands))


def name_of(kernel: Kernel) -> str:
    flags = [option for option, value in kernel.options.items() if value is True]
    numbers = [value for value in kernel.options.values() if isinstance(value, str)]
    return " ".join([str(kernel.op).split(".")[1], *flags, *numbers])


USED = [
    pytest.param(kernel, dtype, id=f"{name_of(kernel)}-{dtype}")
    for kernel in kernels()
    for dtype in (torch.float64, torch.bfloat16)
    if kernel.computes(torch.empty(0, dtype=dtype))
]


@pytest.mark.parametrize(("kernel", "dtype"), USED)
def test_a_formula_is_what_the_kernel_computes(kernel: Kernel, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # Some vectors of the processor, and a rest.
    known = {name: torch.rand(75, generator=generator, dtype=torch.float64) for name in ("p", "g", *kernel.state)}
    known["g"] -= 0.5
    known["p"] += 1.0  # and the update leaves no small difference
    known = {name: x.to(dtype) for name, x in known.items()}
    if kernel.counts:
        known[kernel.counts] = torch.tensor(3.0)
    numbers = {each: torch.rand((), generator=generator, dtype=torch.float64) for each in kernel.options.values()}
    everything = known | {name: number for name, number in numbers.items() if isinstance(name, str)}

    new = {name: value_of(formula, everything) for name, formula in kernel.updates.items()}
    given = known | ({kernel.counts: new[kernel.counts].float()} if kernel.counts else {})
    lists = [[given[name]] if name in given else [] for name in kernel.lists]
    options = {k: numbers[each].item() if isinstance(each, str) else each for k, each in kernel.options.items()}
    results = dict(zip(kernel.lists, kernel.op(*lists, **options), strict=False))

    for name, value in new.items():
        if name != kernel.counts:
            torch.testing.assert_close(
                results[name][0], value.to(dtype), rtol=1e-12 if dtype.itemsize == 8 else 0.02, atol=0
            )
