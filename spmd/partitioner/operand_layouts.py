"""Operands that kernels read in one layout, whatever their strides are.

In eager such an operand is what another op has just made, so its layout is the expected one. In a program it may be a
part cut out of a replica, or a dim that was gathered, and nothing raises: elements are read from wrong places. The
emitter copies an operand of this table that does not lie so, or may not on some rank. ``tests/spmd/rules`` lays
operands out at random and finds what is missing here, on the CPU.
"""

from __future__ import annotations

from enum import Enum, auto

import torch

from passes.ir.ops import aten

from .._torch import OpOverload


class Layout(Enum):
    """The layout in memory that an op needs of an operand."""

    CONTIGUOUS = auto()  # or as in eager
    TOGETHER = auto()  # contiguous, or as in eager if all such operands of the op lie so
    ROWS = auto()  # the elements of its last dim next to each other
    HEADS_IN_ROWS = auto()  # (batch, heads, rows, features): the heads of a row next to each other, and then the rows
    AS_TRACED = auto()  # contiguous exactly if it is so in the global program


def _all(names: str, layout: Layout = Layout.CONTIGUOUS) -> dict[str, Layout]:
    return dict.fromkeys(names.split(), layout)


# The factors that a determinant saves are those of the transposed matrix if the matrix is contiguous; the trace has the
# backward of one case.
_TABLE: dict[str, dict[str, Layout]] = {
    "native_layer_norm_backward": _all("mean rstd"),
    "native_group_norm": _all("input weight bias", Layout.TOGETHER),
    "native_group_norm_backward": _all("grad_out input mean rstd weight", Layout.TOGETHER),
    "_linalg_det _linalg_slogdet": _all("A", Layout.AS_TRACED),
    "_scaled_dot_product_flash_attention_for_cpu": _all("query key value attn_mask", Layout.ROWS),
    "_scaled_dot_product_flash_attention_for_cpu_backward": {
        **_all("grad_out query key value out attn_mask", Layout.ROWS),
        **_all("logsumexp"),
    },
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention": (
        _all("query key value", Layout.ROWS)
    ),
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention_backward": {
        **_all("grad_out query key value out", Layout.ROWS),
        **_all("logsumexp"),
    },
    "_scaled_dot_product_efficient_attention_backward": {
        **_all("grad_out_ query key value", Layout.ROWS),
        **_all("out", Layout.HEADS_IN_ROWS),  # seen on an H100, in bf16: it read beyond the end of another layout
        **_all("logsumexp"),
    },
    "fractional_max_pool2d_backward fractional_max_pool3d_backward": _all("grad_output indices"),
    "adaptive_max_pool3d_backward": _all("grad_output indices"),
    "median.dim nanmedian.dim": _all("self"),
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa": _all("self"),
}
_BY_OP = {op: operands for names, operands in _TABLE.items() for op in aten(names)}


def operand_layouts(op: OpOverload) -> dict[str, Layout]:
    """The operands of ``op`` that must lie in one way, by the name of the argument."""
    return _BY_OP.get(op, {})


def lies(val: torch.Tensor, layout: Layout, traced: torch.Tensor, as_traced: bool) -> bool:
    """Whether ``val`` lies as asked for, or as in eager: ``traced`` is the same operand of the global program.

    ``as_traced``: all operands that lie together do as in eager. The backward of a norm takes images with their
    channels last, but not one such image beside one that is contiguous.
    """
    if lies_like(val, traced) and (as_traced or layout is not Layout.TOGETHER):
        return True
    if layout is Layout.ROWS:
        return val.ndim == 0 or val.stride(-1) == 1
    if layout is Layout.HEADS_IN_ROWS:
        return val.transpose(1, 2).is_contiguous()
    if layout is Layout.AS_TRACED:
        return val.is_contiguous() == traced.is_contiguous()
    return val.is_contiguous()


def lies_like(val: torch.Tensor, traced: torch.Tensor) -> bool:
    """Whether ``val`` has no gaps, and its dims lie in the order of those of ``traced``."""
    if val.ndim != traced.ndim:
        return False
    dims = sorted(range(val.ndim), key=lambda dim: (traced.stride(dim), traced.shape[dim]))  # the innermost first
    expected = 1
    for dim in dims:
        if val.shape[dim] != 1 and val.stride(dim) != expected:
            return False
        expected *= val.shape[dim]
    return True
