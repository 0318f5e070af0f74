"""Scaled dot product attention, for each of torch's kernels: the batch may be split, and heads evenly.

All kernels take (batch, head, time, width). They differ in the dims of the log-sum-exp that they save for backward, and
in their other results. Each rank saves the random state of its own draws, which only its own backward reads, so the
state counts as equal on all ranks. Queries may have more heads than keys: after an even split each rank has the keys of
its queries.
"""

from __future__ import annotations

from .base import Info, OpCall, Option
from .einsum_labels import EQUAL, WHOLE, Dims, aligned, options
from .optional_ops import aten
from .registry import rule

HEADS = "bh.."

# The labels of each kernel's log-sum-exp; some kernels pad it, or add a dim of size 1.
LAYOUTS = {
    "_scaled_dot_product_flash_attention_for_cpu": "bh.",
    "_scaled_dot_product_flash_attention": "bh.",
    "_scaled_dot_product_efficient_attention": "bh.",
    "_scaled_dot_product_cudnn_attention": "bh..",
    "_scaled_dot_product_fused_attention_overrideable": "bh.",
}
FORWARD = {op: layout for name, layout in LAYOUTS.items() for op in aten(name)}
BACKWARD = {op: layout for name, layout in LAYOUTS.items() for op in aten(f"{name}_backward")}


@rule(*FORWARD)
def attention(call: OpCall) -> list[Option]:
    """Batch and heads; no splits with a debug mask."""
    if call.arg("return_debug_mask") or call.arg("query").ndim != 4:
        return []
    operands = dict.fromkeys(("query", "key", "value"), HEADS) | _mask(call)
    logsumexp = _fit(FORWARD[call.target], call.results[1])
    results = (HEADS, logsumexp, *[EQUAL] * (len(call.results) - 2))
    return options(call, Dims(operands, results, even="h", filled="b", grouped="h", broadcast=True))


@rule(*BACKWARD)
def attention_backward(call: OpCall) -> list[Option]:
    """Batch and heads, as in forward; the gradient of a mask only along dims that the mask has."""
    if call.arg("query").ndim != 4:
        return []
    whole = ("grad_out", "grad_out_", "query", "key", "value", "out")
    operands = {name: HEADS for name in whole if call.arg(name) is not None} | _mask(call)
    operands["logsumexp"] = _fit(BACKWARD[call.target], call.arg("logsumexp"))
    results = tuple(HEADS if info is None else aligned(info, HEADS) for info in call.results)
    return options(call, Dims(operands, results, even="h", filled="b", grouped="h", broadcast=True))


def _mask(call: OpCall) -> dict[str, str]:
    """Labels of masks and biases, which broadcast to (batch, head, query, key)."""
    found = ((name, call.arg(name)) for name in ("attn_mask", "attn_bias"))
    return {name: aligned(info, HEADS) for name, info in found if isinstance(info, Info)}


def _fit(labels: str, info: Info | None) -> str:
    """``labels``, truncated or filled to the number of dims."""
    return labels if info is None else labels[: info.ndim].ljust(info.ndim, WHOLE)
