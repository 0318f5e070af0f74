"""Shapes and strides of ``aten._grouped_mm``: the checks and results of its kernels, for tensors without data.

torch's own function for them takes bfloat16 alone, where the kernels take float32 and float16, too; and in a torch
without CUDA its results are contiguous, where the kernels start each row at a multiple of 16 bytes (2.11 to 2.15).
"""

from __future__ import annotations

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16  # bytes


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """An empty result; raises ``RuntimeError`` for operands that the kernels refuse."""
    _check_factors(self, mat2)
    _check_ends(self, mat2, offs)
    if bias is not None or out_dtype not in (None, self.dtype):
        raise RuntimeError(f"expected _grouped_mm without bias, and results in {self.dtype}: its kernels have no more")
    shape = _shape(self, mat2, offs)
    stride = [_padded(shape[-1], self.element_size()), 1]
    return self.new_empty_strided(shape, [shape[1] * stride[0], *stride] if len(shape) == 3 else stride)


def _check_factors(first: Tensor, second: Tensor) -> None:
    if first.dtype not in _DTYPES or first.dtype != second.dtype:
        raise RuntimeError(
            f"expected two factors in float32, float16 or bfloat16 for _grouped_mm, got {first.dtype} and "
            f"{second.dtype}: its kernels multiply nothing else"
        )
    if not {first.ndim, second.ndim} <= {2, 3}:
        raise RuntimeError(f"expected factors of 2 or 3 dims for _grouped_mm, got {first.ndim} and {second.ndim}")
    if (first.ndim == 3 or second.ndim == 3) and first.shape[-1] != second.shape[-2]:
        raise RuntimeError(
            f"expected factors of one contracted size for _grouped_mm, got {tuple(first.shape)} and "
            f"{tuple(second.shape)}"
        )
    for each in (first, second):
        _check_rows(each)


def _check_rows(factor: Tensor) -> None:
    """Rows, or columns, must be contiguous, lie behind one another, and start at multiples of 16 bytes."""
    (rows, columns), (row, column) = factor.shape[-2:], factor.stride()[-2:]
    if row == 1 and column >= max(1, rows):
        step = column
    elif column == 1 and row >= max(1, columns):
        step = row
    else:
        raise RuntimeError(
            f"expected contiguous rows or columns for _grouped_mm, got the strides {factor.stride()} for the shape "
            f"{tuple(factor.shape)}: call contiguous() on the factor"
        )
    if step * factor.element_size() % _ALIGNMENT:
        raise RuntimeError(
            f"expected rows that start at multiples of {_ALIGNMENT} bytes for _grouped_mm, got the strides "
            f"{factor.stride()} in {factor.dtype}: pad the factor's contiguous dim"
        )


def _check_ends(first: Tensor, second: Tensor, ends: Tensor | None) -> None:
    if (ends is not None) != (first.ndim == 2 or second.ndim == 2):
        raise RuntimeError("expected offs for _grouped_mm if a factor has 2 dims, and none if both have 3")
    if ends is not None and (ends.ndim != 1 or ends.dtype != torch.int32):
        raise RuntimeError(f"expected offs of 1 dim in int32 for _grouped_mm, got {ends.ndim} in {ends.dtype}")
    groups = [each.shape[0] for each in (first, second, ends) if each is not None and each.ndim != 2]
    if any(count != groups[0] for count in groups):
        raise RuntimeError(f"expected one number of groups for _grouped_mm, got {groups}")


def _shape(first: Tensor, second: Tensor, ends: Tensor | None) -> list[int]:
    """Groups come first, but for rows or columns of all groups one after another."""
    if first.ndim != second.ndim:
        return [first.shape[-2], second.shape[-1]]
    return [first.shape[0] if ends is None else ends.shape[0], first.shape[-2], second.shape[-1]]


def _padded(columns: int, itemsize: int) -> int:
    """From one row to the next, in elements."""
    each = _ALIGNMENT // itemsize
    return (columns + each - 1) // each * each


_library = torch.library.Library("aten", "IMPL")
_library.impl("_grouped_mm", _grouped_mm, "Meta", allow_override=True)
