"""Ops that reduce dims: kept dims may be split, and a sum or an extreme over a split dim is partial.

An extreme of no elements does not exist: where a rank may have none, all ranks add a neutral element. Capture
decomposes means, variances and norms to sums; the rules here split only their kept dims.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from .._torch import OpOverload
from .base import OpCall, Option, Parts, Run
from .einsum_labels import WHOLE, Dims, letters, options, wrap
from .optional_ops import aten
from .registry import rule

# The partial result of each extreme over a split dim.
SUMS = aten("sum", "sum.dim_IntList")
EXTREMES = {op: Partial("max") for op in aten("amax", "max")} | {op: Partial("min") for op in aten("amin", "min")}

MEANS = aten("mean", "mean.dim")

# Their kept dims only.
OTHERS = aten(
    *("max.dim", "min.dim", "argmax", "argmin", "prod", "prod.dim_int", "mode", "kthvalue"),
    *("median", "median.dim", "nanmedian", "nanmedian.dim"),
    *("any", "any.dim", "any.dims", "all", "all.dim", "all.dims", "logsumexp", "count_nonzero.dim_IntList"),
    *("var", "var.dim", "var.correction", "std", "std.dim", "std.correction"),
    *("var_mean", "var_mean.dim", "var_mean.correction", "std_mean", "std_mean.correction"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype", "linalg_vector_norm"),
)


def labels(call: OpCall) -> tuple[str, str]:
    """The labels of the operand and of the results."""
    before = letters(call.arg("self").ndim)
    reduced = _reduced(call)
    if call.arg("keepdim", False):
        return before, "".join(WHOLE if d in reduced else c for d, c in enumerate(before))
    return before, "".join(c for d, c in enumerate(before) if d not in reduced)


def _reduced(call: OpCall) -> set[int]:
    """The reduced dims: all, if none are given."""
    ndim = call.arg("self").ndim
    dims = call.arg("dim")
    if dims is None or dims == [] or dims == ():
        return set(range(ndim))
    return {wrap(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)}


@rule(*SUMS)
def sums(call: OpCall) -> list[Option]:
    """All dims, a summed one giving a partial sum; a partial sum passes through."""
    before, after = labels(call)
    return options(call, Dims({"self": before}, after, reduced=before, linear=(("self",),)))


@rule(*EXTREMES)
def extremes(call: OpCall) -> list[Option]:
    """All dims, a reduced one giving a partial extreme."""
    before, after = labels(call)
    lost = "".join(c for c in before if c not in after)
    found = options(call, Dims({"self": before}, after, reduced=lost, reduced_as=EXTREMES[call.target]))
    return [replace(option, local=bounded) if _splits_reduced(call, option) else option for option in found]


def _splits_reduced(call: OpCall, option: Option) -> bool:
    (placement,) = option.operands
    return isinstance(placement, Shard) and placement.dim in _reduced(call)


def bounded(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The extreme of this rank's part; if some rank has no elements, all ranks pad with a neutral element."""
    (x, *rest), (part,) = args, parts
    assert part is not None
    more = [int(size == 0 and d in _reduced(call)) for d, size in enumerate(part.smallest)]
    if any(more):
        pad = [n for count in reversed(more) for n in (0, count)]
        x = run(torch.ops.aten.constant_pad_nd.default, (x, pad, _bound(call.arg("self").dtype, call.target)))
    return run(call.target, (x, *rest))


def _bound(dtype: torch.dtype, op: OpOverload) -> float | bool:
    """The neutral element of an extreme in ``dtype``."""
    largest = EXTREMES[op] == Partial("min")
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


def kept(call: OpCall, linear: tuple[tuple[str, ...], ...] = ()) -> list[Option]:
    """All dims that are not reduced."""
    before, after = labels(call)
    return options(call, Dims({"self": before}, after, linear=linear))


rule(*MEANS)(partial(kept, linear=(("self",),)))
rule(*OTHERS)(kept)


@rule(*aten("histc"))
def histogram(call: OpCall) -> list[Option]:
    """All dims, with partial counts, if the bounds are given; else they depend on all elements."""
    low, high = call.arg("min"), call.arg("max")
    if type(low) not in (int, float) or type(high) not in (int, float) or low == high:
        return []
    names = letters(call.arg("self").ndim)
    return options(call, Dims({"self": names}, WHOLE, reduced=names))
