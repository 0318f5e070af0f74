"""Sampling of images at the positions of a grid: rows, channels and positions may be split, evenly."""

from __future__ import annotations

from .base import OpCall, Option
from .einsum_labels import WHOLE, Dims, options
from .optional_ops import aten
from .registry import rule

SPACE = {2: "YX", 3: "ZYX"}
FORWARD = {op: count for count in SPACE for op in aten(f"grid_sampler_{count}d")}
BACKWARD = {op: count for count in SPACE for op in aten(f"grid_sampler_{count}d_backward")}


@rule(*FORWARD)
def sample(call: OpCall) -> list[Option]:
    """Rows, channels, and the positions of the grid, evenly. Linear in the image."""
    image, grid, result = _labels(FORWARD[call.target])
    return options(call, Dims({"input": image, "grid": grid}, result, filled="*", linear=(("input",),)))


@rule(*BACKWARD)
def sample_backward(call: OpCall) -> list[Option]:
    """The same dims: the gradient of the image sums over positions, that of the grid over channels."""
    image, grid, result = _labels(BACKWARD[call.target])
    operands = {"grad_output": result, "input": image, "grid": grid}
    reduced = result.replace("n", "")
    return options(call, Dims(operands, (image, grid), reduced=reduced, filled="*", linear=(("grad_output",),)))


def _labels(count: int) -> tuple[str, str, str]:
    """Labels of image, grid and result."""
    return "nc" + WHOLE * count, "n" + SPACE[count] + WHOLE, "nc" + SPACE[count]
