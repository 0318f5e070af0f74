"""Many matrix products in one op (``grouped_mm``): columns, contraction and the groups' rows may be split.

Where one operand has three dims and the other two, or both have two, a dim of the two is ragged: it has the rows of all
groups one after another, and ``offs`` has the row at which each group ends. The rows may be split anywhere, in the
middle of a group too: a rank's ends are the global ones, counted from its first row and clamped to its part. Where
ranks have other experts, rows are split by group, and a rank has the weights, and ends, of its own groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from ..placements import Dealt, OwnRows
from .base import LocalPart, OpCall, Option, P, Parts, R, Run, S
from .einsum_labels import Dims, option, options
from .optional_ops import aten as ops
from .registry import named, rule, whole

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
    # The first of equal cost is chosen: rows before columns, and partial sums last.
    ordered = sorted([*_rows(call, form), *found], key=lambda o: o.results[0] == P)
    return [replace(o, local=by_parts) for o in ordered]


def _rows(call: OpCall, form: Grouped) -> list[Option]:
    """The ragged rows: anywhere; or, if they go to their experts, dealt out, and by group together with the weights."""
    group = call.arg("offs").group
    if group is None:
        return [option(call, {name: S(dim) for name, dim in form.ragged.items()}, form.result)]
    return [_own_rows(call, form, kind, by_expert=kind is group) for kind in (Dealt(0), group)]


def _own_rows(call: OpCall, form: Grouped, kind: OwnRows, by_expert: bool) -> Option:
    own = {name: kind.along(dim) for name, dim in form.ragged.items()}
    if len(own) == 2:  # the weights' gradient
        return option(call, own, S(0) if by_expert else P)
    (weights,) = {"self", "mat2"} - own.keys()
    (rows,) = own.values()
    return option(call, {**own, weights: S(0) if by_expert else R}, rows)


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
            moved = _own_ends(run, call, ends, k, dim, part)
    return run(call.target, (*factors, moved, *args[3:]))


def _own_ends(run: Run, call: OpCall, ends: Any, position: int, dim: int, part: LocalPart) -> Any:
    """The ends of groups in this rank's rows of an operand."""
    if call.arg("offs").group is not None:
        return run.own_ends(ends, position, dim)
    return run(aten.clamp.default, (run(aten.sub.Tensor, (ends, part.start[dim])), 0, part.shape[dim]))


def _row_by_row(run: Run, factor: Any, dim: int) -> Any:
    """``factor`` with its ragged rows contiguous in memory, as kernels need it."""
    if dim == 0:
        return run(aten.contiguous.default, (factor,))
    return run(aten.t.default, (run(aten.contiguous.default, (run(aten.t.default, (factor,)),)),))


@named("transformers::grouped_mm_fallback")
def grouped_mm_fallback(call: OpCall) -> list[Option]:
    """The product (rows, k) x (groups, k, n) of transformers, for all dtypes: the ragged rows, columns, contraction."""
    plain = options(call, Dims({"input": ".k", "weight": ".kn"}, ".n", reduced="k", linear=(("input",), ("weight",))))
    return [*_rows_of(call, ("input",), (S(0),)), *plain]


@named("transformers::grouped_mm_fallback_backward")
def grouped_mm_fallback_backward(call: OpCall) -> list[Option]:
    """The gradients of rows and weights: the ragged rows, with a summand of the weights' gradient; columns, too."""
    plain = Dims({"input": ".k", "weight": ".kn", "grad_output": ".n"}, (".k", ".kn"), reduced="n")
    return [*_rows_of(call, ("input", "grad_output"), (S(0), P)), *options(call, plain)]


def _rows_of(call: OpCall, ragged: Sequence[str], results: tuple[Placement, ...]) -> list[Option]:
    group = call.arg("offs").group
    if group is None:
        return [replace(option(call, dict.fromkeys(ragged, S(0)), results), local=of_own_rows)]
    dealt = option(call, dict.fromkeys(ragged, Dealt(0)), (Dealt(0), *results[1:]))
    by_group = option(call, {**dict.fromkeys(ragged, group), "weight": S(0)}, (group, *(S(0) for _ in results[1:])))
    return [replace(each, local=of_own_rows) for each in (dealt, by_group)]


def of_own_rows(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The op on this rank's rows, of which groups end elsewhere."""
    (part, *_), (rows, weight, ends, *others) = parts, args
    assert part is not None
    return run(call.target, (rows, weight, _own_ends(run, call, ends, 0, 0, part), *others))


# The layout of scales differs by kernel.
whole(*ops("_scaled_grouped_mm"))
