"""Ops that reduce dims: kept dims may be split, and a sum or an extreme over a split dim is partial.

An extreme of no elements does not exist, so the dim of an extreme must split evenly. Means, variances and norms over a
split dim are taken apart at capture, to sums; here they keep to the kept dims.
"""

from __future__ import annotations

from functools import partial

from torch.distributed.tensor import Partial

from .base import Call, Option
from .labels import WHOLE, Dims, letters, options, wrap
from .ops import aten
from .table import rule

# How a split dim that is reduced comes out; for a sum also which operand may come in partial.
SUMS = aten("sum", "sum.dim_IntList")
EXTREMES = {op: Partial("max") for op in aten("amax", "max")} | {op: Partial("min") for op in aten("amin", "min")}

MEANS = aten("mean", "mean.dim")

# Only the kept dims.
OTHERS = aten(
    *("max.dim", "min.dim", "argmax", "argmin", "prod", "prod.dim_int", "median.dim", "mode", "kthvalue"),
    *("any", "any.dim", "any.dims", "all", "all.dim", "all.dims", "logsumexp", "count_nonzero.dim_IntList"),
    *("var", "var.dim", "var.correction", "std", "std.dim", "std.correction"),
    *("var_mean", "var_mean.dim", "var_mean.correction", "std_mean", "std_mean.correction"),
    *("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype", "linalg_vector_norm"),
)


def labels(call: Call) -> tuple[str, str]:
    """The labels of the operand and of the results."""
    before = letters(call.arg("self").ndim)
    reduced = _reduced(call)
    if call.arg("keepdim", False):
        return before, "".join(WHOLE if d in reduced else c for d, c in enumerate(before))
    return before, "".join(c for d, c in enumerate(before) if d not in reduced)


def _reduced(call: Call) -> set[int]:
    """The dims reduced; none given means all."""
    ndim = call.arg("self").ndim
    dims = call.arg("dim")
    if dims is None or dims == [] or dims == ():
        return set(range(ndim))
    return {wrap(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)}


@rule(*SUMS)
def sums(call: Call) -> list[Option]:
    """A split dim that is summed gives a partial sum; a partial sum stays one."""
    before, after = labels(call)
    return options(call, Dims({"self": before}, after, reduced=before, linear=(("self",),)))


@rule(*EXTREMES)
def extremes(call: Call) -> list[Option]:
    """A split dim that is reduced gives a partial extreme, if no rank's part is empty."""
    before, after = labels(call)
    lost = "".join(c for c in before if c not in after)
    return options(call, Dims({"self": before}, after, reduced=lost, reduced_as=EXTREMES[call.target], even=lost))


def kept(call: Call, linear: tuple[tuple[str, ...], ...] = ()) -> list[Option]:
    """Only dims that are not reduced."""
    before, after = labels(call)
    return options(call, Dims({"self": before}, after, linear=linear))


rule(*MEANS)(partial(kept, linear=(("self",),)))
rule(*OTHERS)(kept)
