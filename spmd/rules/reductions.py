"""Ops that reduce dims: kept dims may be split, and a sum or an extreme over a split dim is partial.

An extreme of no elements does not exist: a rank that may have none adds one that counts for nothing. Means, variances
and norms over a split dim are taken apart at capture, to sums; here they keep to the kept dims.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from .._torch import OpOverload
from .aten import aten
from .base import OpCall, Option, Parts, Run
from .einsum_labels import WHOLE, Dims, letters, options, wrap
from .registry import rule

# How a split dim that is reduced comes out; for a sum also which operand may come in partial.
SUMS = aten("sum", "sum.dim_IntList")
EXTREMES = {op: Partial("max") for op in aten("amax", "max")} | {op: Partial("min") for op in aten("amin", "min")}

MEANS = aten("mean", "mean.dim")

# Only the kept dims.
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
    """The dims reduced; none given means all."""
    ndim = call.arg("self").ndim
    dims = call.arg("dim")
    if dims is None or dims == [] or dims == ():
        return set(range(ndim))
    return {wrap(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)}


@rule(*SUMS)
def sums(call: OpCall) -> list[Option]:
    """A split dim that is summed gives a partial sum; a partial sum stays one."""
    before, after = labels(call)
    return options(call, Dims({"self": before}, after, reduced=before, linear=(("self",),)))


@rule(*EXTREMES)
def extremes(call: OpCall) -> list[Option]:
    """A split dim that is reduced gives a partial extreme."""
    before, after = labels(call)
    lost = "".join(c for c in before if c not in after)
    found = options(call, Dims({"self": before}, after, reduced=lost, reduced_as=EXTREMES[call.target]))
    return [replace(option, local=bounded) if _splits_reduced(call, option) else option for option in found]


def _splits_reduced(call: OpCall, option: Option) -> bool:
    (placed,) = option.operands
    return isinstance(placed, Shard) and placed.dim in _reduced(call)


def bounded(run: Run, call: OpCall, args: tuple[Any, ...], parts: Parts, results: Parts) -> Any:
    """The extreme of this rank's part; where some rank has nothing, all of them add what changes no extreme."""
    (x, *rest), (part,) = args, parts
    assert part is not None
    more = [int(size == 0 and d in _reduced(call)) for d, size in enumerate(part.smallest)]
    if any(more):
        pad = [n for count in reversed(more) for n in (0, count)]
        x = run(torch.ops.aten.constant_pad_nd.default, (x, pad, _bound(call.arg("self").dtype, call.target)))
    return run(call.target, (x, *rest))


def _bound(dtype: torch.dtype, op: OpOverload) -> float | bool:
    """What no element of ``dtype`` is beyond."""
    largest = EXTREMES[op] == Partial("min")
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    return torch.iinfo(dtype).max if largest else torch.iinfo(dtype).min


def kept(call: OpCall, linear: tuple[tuple[str, ...], ...] = ()) -> list[Option]:
    """Only dims that are not reduced."""
    before, after = labels(call)
    return options(call, Dims({"self": before}, after, linear=linear))


rule(*MEANS)(partial(kept, linear=(("self",),)))
rule(*OTHERS)(kept)


@rule(*aten("histc"))
def histogram(call: OpCall) -> list[Option]:
    """Each rank counts its own elements; between bounds that are left to the data all of them have to be known."""
    low, high = call.arg("min"), call.arg("max")
    if type(low) not in (int, float) or type(high) not in (int, float) or low == high:
        return []
    names = letters(call.arg("self").ndim)
    return options(call, Dims({"self": names}, WHOLE, reduced=names))
