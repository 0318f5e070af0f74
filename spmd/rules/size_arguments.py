"""Replace arguments that hold sizes, which are global in the captured graph, by this rank's.

Nearly always the size is that of the first result; the table has the name of the argument.
"""

from __future__ import annotations

from typing import Any

from .base import OpCall, parameters
from .optional_ops import aten
from .registry import localize

Shapes = tuple[tuple[int, ...] | None, ...]

SIZES = {
    "size": aten(
        *("zeros", "ones", "full", "empty.memory_format", "empty_permuted"),
        *("rand", "rand.generator", "randn", "randn.generator"),
        *("randint", "randint.generator", "randint.low", "randint.low_generator"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
        *("view", "_unsafe_view", "view_copy", "expand", "expand_copy"),
    ),
    "shape": aten("reshape"),
    "input_sizes": aten("select_backward", "diagonal_backward", "unfold_backward"),
    "input_size": aten(
        *("upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward"),
        *("_upsample_nearest_exact1d_backward", "_upsample_nearest_exact2d_backward"),
        *("_upsample_nearest_exact3d_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward"),
        *("upsample_bicubic2d_backward", "upsample_trilinear3d_backward"),
        *("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward", "_upsample_lanczos2d_aa_backward"),
    ),
}
NAMES = {op: name for name, ops in SIZES.items() for op in ops}


@localize(*NAMES)
def size_of_result(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The arguments with the shape of the first result."""
    assert shapes[0] is not None
    return replaced(call, args, NAMES[call.target], list(shapes[0]))


@localize(*aten("empty_strided", "new_empty_strided"))
def strided(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The arguments with the shape of the result, and dense strides in the same order."""
    shape = shapes[0]
    assert shape is not None
    order = sorted(range(len(shape)), key=lambda d: call.arg("stride")[d])
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return replaced(call, replaced(call, args, "size", list(shape)), "stride", strides)


@localize(*aten("native_group_norm", "native_group_norm_backward"))
def rows(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The arguments with the number of rows; unchanged without a result that has rows, since nothing is split."""
    return args if shapes[0] is None else replaced(call, args, "N", shapes[0][0])


@localize(*aten("convolution"))
def groups(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The arguments with the number of groups."""
    (result,), (shape,) = call.results, shapes
    assert result is not None and shape is not None
    return _with_groups(call, args, shape[1], result.shape[1])


@localize(*aten("convolution_backward"))
def bias(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> tuple[Any, ...]:
    """The arguments with the shape of the bias, and the number of groups."""
    args = args if shapes[2] is None else replaced(call, args, "bias_sizes", list(shapes[2]))
    for info, shape, dim in zip(call.results, shapes, (1, 0, 0), strict=True):
        if info is not None and shape is not None and call.arg("groups") > 1:
            return _with_groups(call, args, shape[dim], info.shape[dim])
    return args


def _with_groups(call: OpCall, args: tuple[Any, ...], own: int, all_channels: int) -> tuple[Any, ...]:
    """Without groups, channels may be split all the same: then they are summed over."""
    return args if call.arg("groups") == 1 else replaced(call, args, "groups", call.arg("groups") * own // all_channels)


def replaced(call: OpCall, args: tuple[Any, ...], name: str, value: Any) -> tuple[Any, ...]:
    """``args`` with ``value`` for the positional argument ``name``."""
    position, _ = parameters(call.target)[name]
    assert position is not None and position < len(args), f"{call.target}: expected {name!r} by position"
    return (*args[:position], value, *args[position + 1 :])
