"""Fourier transforms: every dim that is not transformed may be split, and partial sums pass through."""

from __future__ import annotations

from .base import OpCall, Option
from .einsum_labels import Dims, letters, options, without
from .optional_ops import aten
from .registry import rule


@rule(*aten("_fft_r2c", "_fft_c2r", "_fft_c2c"))
def transform(call: OpCall) -> list[Option]:
    """All dims but the transformed ones, evenly, since some kernels reject a tensor without rows."""
    ndim = call.operands[0].ndim
    names = without(letters(ndim), *call.arg("dim"))
    return options(call, Dims({"self": names}, names, filled="*", linear=(("self",),)))
