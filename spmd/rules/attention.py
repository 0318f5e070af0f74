"""Scaled dot product attention, for each of torch's kernels: the batch may be split, heads evenly, and queries.

All kernels take (batch, head, time, width). They differ in the dims of the log-sum-exp that they save for backward, and
in their other results. Each rank saves the random state of its own draws, which only its own backward reads, so the
state counts as equal on all ranks. Queries may have more heads than keys: after an even split each rank has the keys of
its queries. Where queries are split along the sequence, keys are whole, or pass around (``sequence_attention.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch.distributed.tensor import Shard

from ..placements import Mirrored
from . import sequence_attention
from .base import Info, Local, OpCall, Option, S, Sends, parameters
from .einsum_labels import EQUAL, WHOLE, Dims, aligned, option, options
from .optional_ops import aten
from .registry import rule

HEADS, QUERIES = "bh..", "bht."
Form = Literal["gather", "ring", "heads"]
"""What ranks exchange for attention over a split sequence: all keys, keys of one rank at a time, or heads for rows."""

GATHER, RING = "gather", "ring"

# The labels of each kernel's log-sum-exp; some kernels pad it, or add a dim of size 1.
LAYOUTS = {
    "_scaled_dot_product_flash_attention_for_cpu": "bht",
    "_scaled_dot_product_flash_attention": "bh.",
    "_scaled_dot_product_efficient_attention": "bh.",
    "_scaled_dot_product_cudnn_attention": "bh..",
    "_scaled_dot_product_fused_attention_overrideable": "bh.",
}
FORWARD = {op: layout for name, layout in LAYOUTS.items() for op in aten(name)}
BACKWARD = {op: layout for name, layout in LAYOUTS.items() for op in aten(f"{name}_backward")}


@rule(*FORWARD)
def attention(call: OpCall) -> list[Option]:
    """Batch and heads, and rows of queries; no splits with a debug mask."""
    if call.arg("return_debug_mask") or call.arg("query").ndim != 4:
        return []
    layout = FORWARD[call.target]
    queries = _of_queries(layout)
    operands = {"query": queries, "key": HEADS, "value": HEADS} | _mask(call, queries)
    results = (queries, _fit(layout, call.results[1]), *[EQUAL] * (len(call.results) - 2))
    found = options(call, Dims(operands, results, even="h", filled="bt", grouped="h", broadcast=True))
    by_rows = _by_rows(call, found, sequence_attention.gathered)
    return by_rows + _in_a_ring(call, by_rows, sequence_attention.ring, sequence_attention.ring_sends)


@rule(*BACKWARD)
def attention_backward(call: OpCall) -> list[Option]:
    """As in forward; the gradient of a mask only along dims that the mask has."""
    if call.arg("query").ndim != 4:
        return []
    layout = BACKWARD[call.target]
    queries = _of_queries(layout)
    of_queries = (name for name in ("grad_out", "grad_out_", "query", "out") if call.arg(name) is not None)
    operands = {**dict.fromkeys(of_queries, queries), "key": HEADS, "value": HEADS} | _mask(call, queries)
    operands["logsumexp"] = _fit(layout, call.arg("logsumexp"))
    labels = (queries, HEADS, HEADS, *[HEADS] * (len(call.results) - 3))
    results = tuple(x if info is None else aligned(info, x) for x, info in zip(labels, call.results, strict=True))
    dims = Dims(operands, results, reduced="t", even="h", filled="bt", grouped="h", broadcast=True)
    by_rows = _by_rows(call, options(call, dims), sequence_attention.gathered_backward)
    ring, sends = sequence_attention.ring_backward, sequence_attention.ring_backward_sends
    return by_rows + _in_a_ring(call, by_rows, ring, sends)


def is_attention(call: OpCall) -> bool:
    """Whether a call is attention, or its backward."""
    return call.target in FORWARD or call.target in BACKWARD


def splits_causal_rows(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is causal attention, of which ranks may have rows of queries."""
    if target not in FORWARD or _of_queries(FORWARD[target]) == HEADS:
        return False
    position, default = parameters(target)["is_causal"]
    given = args[position] if position is not None and position < len(args) else kwargs.get("is_causal", default)
    return bool(given)


def has_form(option: Option, form: str) -> bool:
    """Whether an option of attention has a form."""
    return option.name == form or (form == "heads" and option.results[0] == S(1))


def _by_rows(call: OpCall, found: list[Option], causal: Local) -> list[Option]:
    """The options, where those that split the rows of queries have names, and programs of their own if necessary."""
    kept = [option for option in found if not _splits_queries(option)]
    if call.arg("dropout_p"):
        return kept  # the parts would draw the same numbers
    by_rows = [replace(option, name=GATHER) for option in found if _splits_queries(option)]
    if call.arg("is_causal"):
        own_keys = call.arg("query").shape[2] == call.arg("key").shape[2]
        by_rows = [replace(option, local=causal) for option in by_rows if own_keys and option.results[0] in _PARTS]
    return kept + by_rows


_PARTS = (S(2), Mirrored(2, 1))  # of queries, whose places in the whole the programs know


def _in_a_ring(call: OpCall, found: list[Option], ring: Local, sends: Sends) -> list[Option]:
    """For options that gather keys, those that pass them around; none with a mask, which has columns for all keys."""
    rows = call.arg("key").shape[2]
    if _mask(call, HEADS) or not call.fills(rows):
        return []
    parts = _PARTS if rows == call.arg("query").shape[2] else _PARTS[:1]
    split = [o.results[0] for o in found if o.name == GATHER and o.results[0] in parts]
    tensors = [name for name in parameters(call.target) if isinstance(call.arg(name), Info)]
    made = [option(call, dict.fromkeys(tensors, placed), placed) for placed in split if placed is not None]
    return [replace(each, local=ring, sends=sends, name=RING) for each in made]


def _splits_queries(option: Option) -> bool:
    first = option.results[0]
    return isinstance(first, Shard) and first.dim == 2


def _of_queries(layout: str) -> str:
    """The labels of queries: their rows may be split where those of the log-sum-exp may."""
    return QUERIES if "t" in layout else HEADS


def _mask(call: OpCall, queries: str) -> dict[str, str]:
    """Labels of masks and biases, which broadcast to (batch, head, query, key)."""
    found = ((name, call.arg(name)) for name in ("attn_mask", "attn_bias"))
    return {name: aligned(info, queries) for name, info in found if isinstance(info, Info)}


def _fit(labels: str, info: Info | None) -> str:
    """``labels``, truncated or filled to the number of dims."""
    return labels if info is None else labels[: info.ndim].ljust(info.ndim, WHOLE)
