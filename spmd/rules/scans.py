"""Ops that work along one dim (softmax, sort, cumsum): every other dim may be split."""

from __future__ import annotations

from .._torch import OpOverload
from .base import OpCall, Option
from .einsum_labels import Dims, arguments, infos, letters, options, without, wrap
from .optional_ops import aten
from .registry import rule

# Linear in this operand, so that a partial sum passes through.
LINEAR: dict[OpOverload, str] = {
    **dict.fromkeys(aten("cumsum", "flip", "roll"), "self"),
    **dict.fromkeys(aten("_softmax_backward_data", "_log_softmax_backward_data"), "grad_output"),
}

OTHERS = aten(
    *("_softmax", "_log_softmax", "softmax.int", "log_softmax.int", "_safe_softmax"),
    *("sort", "sort.stable", "argsort", "argsort.stable", "topk"),
    *("cumprod", "logcumsumexp", "cummax", "cummin", "glu", "glu_backward"),
)


@rule(*LINEAR, *OTHERS)
def along(call: OpCall) -> list[Option]:
    """All dims of operands and results but the one that the op works along."""
    ndim = call.operands[0].ndim
    names = without(letters(ndim), *_dims(call, ndim))
    operands = {name: names for name, value in arguments(call) for _ in infos(value)}
    linear = ((LINEAR[call.target],),) if call.target in LINEAR else ()
    return options(call, Dims(operands, names, linear=linear))


def _dims(call: OpCall, ndim: int) -> set[int]:
    """The dims that the op works along; all for ``roll`` without dims, which flattens."""
    dims = call.arg("dims", call.arg("dim"))
    if dims == [] or dims == ():
        return set(range(ndim)) if "roll" in str(call.target) else set()
    return {wrap(d, ndim) for d in ([dims] if isinstance(dims, int) else dims)}
