"""Many matrix products in one op (``grouped_mm``): columns, contraction and the groups' rows may be split.

Where one operand has three dims and the other two, or both have two, a dim of the two is ragged: it has the rows of all
groups one after another, and ``offs`` has the row at which each group ends. The rows may be split anywhere, in the
middle of a group too: a rank's ends are the global ones, counted from its first row and clamped to its part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from .base import OpCall, Option, P, Parts, Run, S
from .einsum_labels import Dims, option, options
from .optional_ops import aten as ops
from .registry import rule, whole

aten = torch.ops.aten
_STRIDE = 16  # bytes: kernels accept matrices whose rows start at multiples of it


@dataclass(frozen=True)
class Grouped:
    """A combination of factors: the labels of its plain dims, the factors' ragged dims, the result if those split."""

    dims: Dims
    ragged: dict[str, int]
    result: Placement


def _dims(factor: str, other: str, result: str, reduced: str = "k") -> Dims:
    return Dims({"self": factor, "mat2": other}, result, reduced=reduced, linear=(("self",), ("mat2",)))


# By the numbers of dims of the two factors.
_FORMS = {
    (2, 3): Grouped(_dims(".k", ".kn", ".n"), {"self": 0}, S(0)),
    (3, 2): Grouped(_dims(".mk", "k.", "m."), {"mat2": 1}, S(1)),
    (2, 2): Grouped(_dims("m.", ".n", ".mn", reduced=""), {"self": 1, "mat2": 0}, P),
    (3, 3): Grouped(_dims("gmk", "gkn", "gmn"), {}, S(0)),
}


@rule(*ops("_grouped_mm"))
def grouped_mm(call: OpCall) -> list[Option]:
    """The dims of each product, if the parts' rows are aligned as kernels need; and the ragged rows."""
    form = _form(call)
    if call.arg("bias") is not None:
        return []  # torch has none yet
    found = [o for o in options(call, form.dims) if _is_aligned(call, o)]
    if not form.ragged:
        return found
    rows = option(call, {name: S(dim) for name, dim in form.ragged.items()}, form.result)
    # The first of equal cost is chosen: rows before columns, and partial sums last.
    ordered = sorted([rows, *found], key=lambda o: o.results[0] == P)
    return [replace(o, local=by_parts) for o in ordered]


def _form(call: OpCall) -> Grouped:
    return _FORMS[call.arg("self").ndim, call.arg("mat2").ndim]


def _is_aligned(call: OpCall, option: Option) -> bool:
    """Whether the parts of matrices have rows, or columns, of multiples of ``_STRIDE`` bytes."""
    return all(
        call.even(info.shape[p.dim]) and info.shape[p.dim] // call.size * info.dtype.itemsize % _STRIDE == 0
        for info, p in zip(call.operands, option.operands, strict=True)
        if isinstance(p, Shard) and p.dim >= info.ndim - 2
    )


def by_parts(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The products of this rank's rows; groups without rows on this rank have length 0."""
    *factors, ends = args[:3]
    for k, name in enumerate(("self", "mat2")):
        dim, part = _form(call).ragged.get(name), parts[k]
        if dim is not None and part is not None:
            factors[k] = _row_by_row(run, factors[k], dim)
            start, length = part.start[dim], part.shape[dim]
    moved = run(aten.clamp.default, (run(aten.sub.Tensor, (ends, start)), 0, length))
    return run(call.target, (*factors, moved, *args[3:]))


def _row_by_row(run: Run, factor: Any, dim: int) -> Any:
    """``factor`` with its ragged rows contiguous in memory, as kernels need it."""
    if dim == 0:
        return run(aten.contiguous.default, (factor,))
    return run(aten.t.default, (run(aten.contiguous.default, (run(aten.t.default, (factor,)),)),))


# The layout of scales differs by kernel.
whole(*ops("_scaled_grouped_mm"))
