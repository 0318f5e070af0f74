"""Elementwise ops: each element depends on the elements at the same position, after broadcasting.

Any dim of the result may be split, also unevenly: an operand that has the dim is split likewise, one that lacks it (or
has size 1 there) is replicated. The generic rule is for every aten op with the tag ``pointwise``; ``LINEAR`` lists the
operands through which a partial sum passes. It passes only where the result is no larger than the partial operand:
else a later reduction would move more bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from passes.ir.ops import Trait, has, listed

from .._torch import OpOverload
from .base import OpCall, Option
from .einsum_labels import EQUAL, WHOLE, Dims, aligned, arguments, grows, infos, is_zero, letters, options
from .optional_ops import aten
from .registry import rule, tagged

# Ops that are linear in each of these sets of operands, if all of the set are tensors.
LINEAR: dict[OpOverload, tuple[tuple[str, ...], ...]] = {
    op: sets
    for names, sets in {
        ("neg", "deg2rad", "rad2deg", "_to_copy", "_conj", "conj_physical", "real", "imag"): (("self",),),
        ("mul.Tensor",): (("self",), ("other",)),
        ("mul.Scalar", "div.Tensor", "div.Scalar"): (("self",),),
        ("add.Tensor", "sub.Tensor", "rsub.Tensor"): (("self", "other"),),
        ("where.self",): (("self", "other"),),
        ("masked_fill.Tensor",): (("self", "value"),),
        ("lerp.Scalar", "lerp.Tensor"): (("self", "end"),),
        ("addcmul",): (("self", "tensor1"), ("self", "tensor2")),
        ("addcdiv",): (("self", "tensor1"),),
        ("copy",): (("src",), ("self", "src")),
        (
            "threshold_backward",
            "gelu_backward",
            "silu_backward",
            "sigmoid_backward",
            "tanh_backward",
            "native_dropout_backward",
            "leaky_relu_backward",
            "elu_backward",
            "hardtanh_backward",
            "hardswish_backward",
            "hardsigmoid_backward",
            "softplus_backward",
            "log_sigmoid_backward",
            "mish_backward",
            "logit_backward",
            "_prelu_kernel_backward",
        ): (("grad_output",),),
    }.items()
    for op in aten(*names)
}

# Ops that are linear in `self` where this argument, the value for other elements, is zero.
LINEAR_AT_ZERO = {op: name for op in aten("masked_fill.Scalar") for name in ["value"]} | {
    op: name for op in aten("where.ScalarOther") for name in ["other"]
}


@tagged(torch.Tag.pointwise)
def pointwise(call: OpCall) -> list[Option]:
    """Any dim of the result, and the partial operands of ``LINEAR``."""
    shape = call.results[0].shape if call.results and call.results[0] is not None else None
    if shape is None or shape != broadcast([i.shape for i in call.operands]):
        return []
    names = letters(len(shape))
    operands = {name: aligned(info, names) for name, value in arguments(call) for info in infos(value)}
    # log_sigmoid_forward has an empty second result on some devices.
    results = tuple(names if info is None or info.shape == shape else EQUAL for info in call.results)
    moves = ("self",) if has(call.target, Trait.SAME_ELEMENTS) else ()  # every kind of partial passes
    return options(call, Dims(operands, results, broadcast=True, linear=linear(call), moves=moves))


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that compatible ``shapes`` broadcast to; torch's own function is slow."""
    ndim = max(map(len, shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def linear(call: OpCall) -> tuple[tuple[str, ...], ...]:
    """The sets of operands that may be partial in this call."""
    zero = LINEAR_AT_ZERO.get(call.target)
    sets = LINEAR.get(call.target, ())
    if zero is not None and is_zero(call.arg(zero)):
        sets = (("self",),)
    return tuple(names for names in sets if not grows(call, names))


@rule(*aten("prelu"))
def prelu(call: OpCall) -> list[Option]:
    """Any dim; the weights, if there are several, are those of dim 1."""
    names = letters(call.arg("self").ndim)
    weight = call.arg("weight")
    labels = names[1] if weight.shape and weight.shape != (1,) else WHOLE * weight.ndim
    return options(call, Dims({"self": names, "weight": labels}, names))


_untagged = (op for op in listed(Trait.POINTWISE) if torch.Tag.pointwise not in op.tags)
rule(*(op for op in _untagged if op not in aten("prelu")))(pointwise)
