"""Many products of matrices in one op (``grouped_mm``): columns, contraction and the groups' rows may be split.

Where one operand has three dims and the other two, or both have two, a dim of the two is ragged: the rows of all groups
one after another, ``offs`` the row at which each group ends. Any cut through these rows will do, in the middle of a
group too: a rank's ends are those of the whole, counted from its first row and kept within its part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from .aten import aten as ops
from .base import OpCall, Option, P, Parts, Run, S
from .einsum_labels import Dims, option, options
from .registry import rule, whole

aten = torch.ops.aten
_STRIDE = 16  # bytes: kernels take matrices whose rows begin at multiples of it


@dataclass(frozen=True)
class Grouped:
    """``dims``: what may be split as in any product; ``ragged``: the operands' ragged dims; ``result`` when split."""

    dims: Dims
    ragged: dict[str, int]
    result: Placement


def _dims(factor: str, other: str, result: str, reduced: str = "k") -> Dims:
    return Dims({"self": factor, "mat2": other}, result, reduced=reduced, linear=(("self",), ("mat2",)))


# By the numbers of dims of the factors.
_FORMS = {
    (2, 3): Grouped(_dims(".k", ".kn", ".n"), {"self": 0}, S(0)),
    (3, 2): Grouped(_dims(".mk", "k.", "m."), {"mat2": 1}, S(1)),
    (2, 2): Grouped(_dims("m.", ".n", ".mn", reduced=""), {"self": 1, "mat2": 0}, P),
    (3, 3): Grouped(_dims("gmk", "gkn", "gmn"), {}, S(0)),
}


@rule(*ops("_grouped_mm"))
def grouped_mm(call: OpCall) -> list[Option]:
    """The dims of each product, where the parts' rows still begin where kernels want them; and the ragged rows."""
    form = _form(call)
    if call.arg("bias") is not None:
        return []  # torch has none yet
    found = [o for o in options(call, form.dims) if _begins_well(call, o)]
    if not form.ragged:
        return found
    rows = option(call, {name: S(dim) for name, dim in form.ragged.items()}, form.result)
    # Of what costs alike the first is taken: rows before columns, and last what leaves a sum to be added up.
    ordered = sorted([rows, *found], key=lambda o: o.results[0] == P)
    return [replace(o, local=by_parts) for o in ordered]


def _form(call: OpCall) -> Grouped:
    return _FORMS[call.arg("self").ndim, call.arg("mat2").ndim]


def _begins_well(call: OpCall, option: Option) -> bool:
    """Whether parts of matrices have rows, or columns, of whole multiples of ``_STRIDE`` bytes."""
    return all(
        call.even(info.shape[p.dim]) and info.shape[p.dim] // call.size * info.dtype.itemsize % _STRIDE == 0
        for info, p in zip(call.operands, option.operands, strict=True)
        if isinstance(p, Shard) and p.dim >= info.ndim - 2
    )


def by_parts(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The products of this rank's rows: those of a group that other ranks have count nothing."""
    *factors, ends = args[:3]
    for k, name in enumerate(("self", "mat2")):
        dim, part = _form(call).ragged.get(name), parts[k]
        if dim is not None and part is not None:
            factors[k] = _row_by_row(run, factors[k], dim)
            start, length = part.start[dim], part.shape[dim]
    moved = run(aten.clamp.default, (run(aten.sub.Tensor, (ends, start)), 0, length))
    return run(call.target, (*factors, moved, *args[3:]))


def _row_by_row(run: Run, factor: Any, dim: int) -> Any:
    """``factor`` as kernels want it, however a rank's part came about: one ragged row after another in memory."""
    if dim == 0:
        return run(aten.contiguous.default, (factor,))
    return run(aten.t.default, (run(aten.contiguous.default, (run(aten.t.default, (factor,)),)),))


# Scales are laid out in blocks that differ by kernel.
whole(*ops("_scaled_grouped_mm"))
