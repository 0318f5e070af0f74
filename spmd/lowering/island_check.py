"""Compare the kernels of an island with its ops, once and on examples, before they are taken."""

from __future__ import annotations

import torch
from torch import Tensor

from passes import Island

from .island_call import CompiledIsland
from .island_launch import LaunchedIsland
from .island_times import example

# Of the largest element: sums in another order, and in bf16 one rounding instead of several.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.05}
_TIES = 0.01  # the share of comparisons that rounding may decide, where an island computes with floats


def difference(island: Island, made: CompiledIsland | LaunchedIsland) -> str:
    """A sentence if the kernels compute something else than the ops of the island, or fail; else nothing."""
    writing = island if island.outs else island.with_outs()
    vals = [node.meta["val"] for node in writing.placeholders]
    expected = [example(val, k) for k, val in enumerate(vals)]  # operands differ: x - y is not y - x
    outs = len(writing.outs)
    got = [*expected[:-outs], *map(example, vals[-outs:])]  # which may have gaps
    try:
        with torch.no_grad():
            writing(*expected)
            made.bind(got, vals)()
    except RuntimeError as error:  # integers of examples may be divided by zero
        return f"it fails on examples: {error}"
    names = [node.name for node in writing.outs]
    pairs = zip(names, expected[-outs:], got[-outs:], strict=True)
    tolerance = max(_TOLERANCES.get(val.dtype, 0.0) for val in _vals(writing))
    different = [name.removesuffix("_memory") for name, one, other in pairs if not _agree(one, other, tolerance)]
    return f"its kernels compute another {', '.join(different)} than its ops" if different else ""


def _vals(island: Island) -> list[Tensor]:
    """All tensors in an island: kernels keep in fp32 what an op rounds to bf16, also for a result in fp32."""
    return [val for node in island.graph.nodes if isinstance(val := node.meta.get("val"), Tensor)]


def _agree(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.dtype.is_floating_point:
        return bool((one != other).sum() <= (_TIES * one.numel() if tolerance else 0))
    scale = one.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * max(scale, 1e-30), equal_nan=True)
