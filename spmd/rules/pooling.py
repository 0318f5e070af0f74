"""Pooling and resampling within each channel of each row: rows and channels may be split, evenly."""

from __future__ import annotations

from .._torch import OpOverload
from .base import OpCall, Option, parameters
from .einsum_labels import WHOLE, Dims, arguments, infos, letters, options
from .optional_ops import aten
from .registry import rule

# The number of last dims that are space.
SPACE: dict[OpOverload, int] = (
    {
        op: count
        for count in (1, 2, 3)
        for op in aten(
            *(f"{name}{count}d" for name in ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool")),
            *(f"{name}{count}d_backward" for name in ("avg_pool", "_adaptive_avg_pool", "adaptive_max_pool")),
            *(f"max_pool{count}d_with_indices{end}" for end in ("", "_backward")),
            *(f"upsample_nearest{count}d{end}" for end in ("", ".vec", "_backward")),
            *(f"_upsample_nearest_exact{count}d{end}" for end in ("", ".vec", "_backward")),
            *(f"reflection_pad{count}d{end}" for end in ("", "_backward")),
            *(f"replication_pad{count}d{end}" for end in ("", "_backward")),
        )
    }
    | {
        op: count
        for count, name in [(1, "linear1d"), (2, "bilinear2d"), (2, "bicubic2d"), (3, "trilinear3d")]
        for op in aten(*(f"upsample_{name}{end}" for end in ("", ".vec", "_backward")))
    }
    | {
        op: 2
        for name in ("bilinear", "bicubic", "lanczos")
        for op in aten(*(f"_upsample_{name}2d_aa{end}" for end in ("", "_backward")))
    }
    | {op: count for count in (2, 3) for op in aten(f"fractional_max_pool{count}d_backward")}
)


@rule(*SPACE)
def planes(call: OpCall) -> list[Option]:
    """All dims of operands and results but those of space."""
    space = SPACE[call.target]
    names = letters(call.operands[0].ndim - space) + WHOLE * space
    operands = {name: names for name, value in arguments(call) for _ in infos(value)}
    return options(call, Dims(operands, names, filled="*", linear=linear(call)))


@rule(*aten("fractional_max_pool2d", "fractional_max_pool3d"))
def fractional(call: OpCall) -> list[Option]:
    """Rows and channels; each plane has its own random numbers."""
    space = call.arg("random_samples").shape[-1]
    front = letters(call.arg("self").ndim - space)
    names = front + WHOLE * space
    samples = front.rjust(2, WHOLE) + WHOLE  # without rows as with one row
    return options(call, Dims({"self": names, "random_samples": samples}, names, filled="*"))


def linear(call: OpCall) -> tuple[tuple[str, ...], ...]:
    """The operand that may be partial: the gradient, or the input of averaging, resampling and padding."""
    if call.arg("grad_output") is not None:
        return (("grad_output",),)
    first = next(iter(parameters(call.target)))
    return () if "max_pool" in str(call.target) else ((first,),)
