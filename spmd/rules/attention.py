"""Scaled dot product attention, for each of torch's kernels: the batch may be split, heads evenly, and queries.

All kernels take (batch, head, time, width). They differ in the dims of the log-sum-exp that they save for backward, and
in their other results. Each rank saves the random state of its own draws, which only its own backward reads, so the
state counts as equal on all ranks. Queries may have more heads than keys: after an even split each rank has the keys of
its queries. Where queries are split along the sequence, keys are whole, or pass around (``sequences/``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from ..placements import Mirrored, same_rows
from .base import Info, Local, OpCall, Option, R, S, Sends, parameters
from .einsum_labels import EQUAL, WHOLE, Dims, aligned, arguments, option, options
from .optional_ops import aten
from .registry import rule
from .sequences import gathered_keys, ring
from .sequences.kernels import MASKS, ON_CPU, band_of, finds_gradient_of_mask

HEADS, QUERIES = "bh..", "bht."
Form = Literal["gather", "ring", "heads"]
"""What ranks exchange for attention over a split sequence: all keys, keys of one rank at a time, or heads for rows."""

GATHER, RING = "gather", "ring"

# The labels of each kernel's log-sum-exp; some kernels pad it, or add a dim of size 1.
LAYOUTS = {
    "_scaled_dot_product_flash_attention_for_cpu": "bht",
    "_scaled_dot_product_flash_attention": "bht",
    "_scaled_dot_product_efficient_attention": "bht",
    "_scaled_dot_product_cudnn_attention": "bht.",
    "_scaled_dot_product_fused_attention_overrideable": "bh.",
}
FORWARD = {op: layout for name, layout in LAYOUTS.items() for op in aten(name)}
BACKWARD = {op: layout for name, layout in LAYOUTS.items() for op in aten(f"{name}_backward")}
KERNELS = {*FORWARD, *BACKWARD}


@rule(*FORWARD)
def attention(call: OpCall) -> list[Option]:
    """Batch and heads, and rows of queries; no splits with a debug mask."""
    if call.arg("return_debug_mask") or call.arg("query").ndim != 4:
        return []
    queries, sums = _labels(call, FORWARD[call.target], call.results[1])
    operands = {"query": queries, "key": HEADS, "value": HEADS} | _mask(call, queries)
    results = (queries, sums, *[EQUAL] * (len(call.results) - 2))
    found = options(call, Dims(operands, results, same="t", even="h", filled="bt", grouped="h", broadcast=True))
    by_rows = _by_rows(call, found, gathered_keys.gathered, gathered_keys.to_all_keys)
    return by_rows + _in_a_ring(call, by_rows, ring.ring, ring.ring_sends)


@rule(*BACKWARD)
def attention_backward(call: OpCall) -> list[Option]:
    """Batch, heads and rows of queries, as in forward; the gradient of a mask only along dims that the mask has."""
    if call.arg("query").ndim != 4:
        return []
    queries, sums = _labels(call, BACKWARD[call.target], call.arg("logsumexp"))
    of_queries = (name for name in ("grad_out", "grad_out_", "query", "out") if call.arg(name) is not None)
    operands = {**dict.fromkeys(of_queries, queries), "key": HEADS, "value": HEADS} | _mask(call, queries)
    operands["logsumexp"] = sums
    labels = (queries, HEADS, HEADS, *[queries] * (len(call.results) - 3))
    results = tuple(x if info is None else aligned(info, x) for x, info in zip(labels, call.results, strict=True))
    dims = Dims(operands, results, reduced="t", even="h", filled="bt", grouped="h", broadcast=True)
    by_rows = _by_rows(call, options(call, dims), gathered_keys.gathered_backward, gathered_keys.to_all_keys_backward)
    return by_rows + _in_a_ring(call, by_rows, ring.ring_backward, ring.ring_backward_sends)


def is_attention(call: OpCall) -> bool:
    """Whether a call is attention, or its backward."""
    return call.target in KERNELS


def splits_causal_rows(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is causal attention, of which ranks may have rows of queries."""
    if "t" not in FORWARD.get(target, ""):
        return False
    given = {**dict(zip(parameters(target), args, strict=False)), **kwargs}
    return bool(given.get("is_causal")) and not given.get("dropout_p")


def has_form(option: Option, form: str) -> bool:
    """Whether an option of attention has a form."""
    return option.name == form or (form == "heads" and option.results[0] == S(1))


def is_asked_for(call: OpCall, option: Option) -> bool:
    """Whether only users choose an option: in a ring, rows of which a finite number hides all keys come out otherwise.

    Their sums of exponentials have no digits left in its logarithm, by which a ring merges them.
    """
    return option.name == RING and any(isinstance(call.arg(name), Info) for name in MASKS)


def _by_rows(call: OpCall, found: list[Option], by_position: Local, to_all: Local) -> list[Option]:
    """The options, where those that split the rows of queries have names, and programs of their own if necessary.

    ``by_position``: of rows whose places in the whole are known; ``to_all``: of any rows, to all keys.
    """
    kept = [option for option in found if not _splits_queries(option)]
    if call.arg("dropout_p"):
        return kept  # the parts would draw the same numbers
    by_rows = [replace(option, name=GATHER) for option in found if _splits_queries(option)]
    if call.arg("is_causal"):
        own_keys = call.arg("query").shape[2] == call.arg("key").shape[2]
        by_rows = [option for option in by_rows if own_keys and option.results[0] in _PARTS]
        return kept + [replace(option, local=by_position) for option in by_rows]
    in_window = gathered_keys.hides_by_position(call)
    plain = None if call.target in ON_CPU else to_all  # others have numbers of rows as arguments
    return kept + [
        replace(option, local=by_position if in_window and option.results[0] == S(2) else plain) for option in by_rows
    ]


_PARTS = (S(2), Mirrored(2, 1))  # of queries, whose places in the whole the programs know


def _in_a_ring(call: OpCall, found: list[Option], local: Local, sends: Sends) -> list[Option]:
    """For options that gather keys, those that pass them around; none with a mask that has a gradient.

    Where no place in a sequence matters, keys may have other places, or another length, than queries.
    """
    rows = call.arg("key").shape[2]
    if finds_gradient_of_mask(call) or not call.fills(rows) or not ring.reads_masks(call):
        return []
    parts = _PARTS if rows == call.arg("query").shape[2] or band_of(call) is None else _PARTS[:1]
    split = [o.results[0] for o in found if o.name == GATHER and o.results[0] in parts]
    made = [_passing(call, placed, placed if rows % (2 * call.size) == 0 else S(2)) for placed in split]
    return [replace(each, local=local, sends=sends, name=RING) for each in made]


def _passing(call: OpCall, queries: Any, keys: Any) -> Option:
    """The option with rows of queries, and of keys, in these placements."""
    given = {name: value for name, value in arguments(call) if isinstance(value, Info)}
    of_keys, rows = (1, 2) if call.target in BACKWARD else (), {"key": keys, "value": keys}
    operands = {name: _with_rows(x, rows.get(name, queries), name in MASKS) for name, x in given.items()}
    return option(
        call, operands, [_with_rows(x, keys if k in of_keys else queries) for k, x in enumerate(call.results)]
    )


def _with_rows(info: Info | None, placed: Shard, is_mask: bool = False) -> Placement:
    """The placement of a tensor where rows are ``placed``: the state of random draws has none, a mask may have one."""
    if info is None or info.ndim < (2 if is_mask else 3):
        return R
    dim = info.ndim - 2 if is_mask else 2
    return same_rows(placed, dim, getattr(placed, "outer", 1)) if info.shape[dim] > int(is_mask) else R


def _splits_queries(option: Option) -> bool:
    first = option.results[0]
    return isinstance(first, Shard) and first.dim == 2


def _labels(call: OpCall, layout: str, sums: Info | None) -> tuple[str, str]:
    """The labels of queries, and of their log-sum-exp: rows may be split if it has as many, or none, not asked for."""
    rows = call.arg("query").shape[2] if sums is None else sums.shape[2]
    by_rows = "t" in layout and rows in (0, call.arg("query").shape[2])
    return QUERIES if by_rows else HEADS, _fit(layout if rows and by_rows else layout.replace("t", WHOLE), sums)


def _mask(call: OpCall, queries: str) -> dict[str, str]:
    """Labels of masks and biases, which broadcast to (batch, head, query, key)."""
    found = ((name, call.arg(name)) for name in ("attn_mask", "attn_bias"))
    return {name: aligned(info, queries) for name, info in found if isinstance(info, Info)}


def _fit(labels: str, info: Info | None) -> str:
    """``labels``, truncated or filled to the number of dims."""
    return labels if info is None else labels[: info.ndim].ljust(info.ndim, WHOLE)
