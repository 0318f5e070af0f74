"""Coalesced collectives: the backend's own collective on each member of a bucket, all in one launch.

The members are stored one after the other, so nothing is packed or unpacked, and NCCL reads and writes them in place.

- ``coalesced_reduce_scatter(x, reduce_op, lengths, ranks, group)``: see ``collective_ops.define_scatter``.
- ``coalesced_all_gather(x, lengths, ranks, group)``: the inverse, see ``collective_ops.define_gather``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import group_named
from .collective_ops import REDUCE_OPS, as_bytes, define_gather, define_scatter, ops
from .gloo import register

REDUCTIONS = frozenset(REDUCE_OPS) - {"product"}  # the parts of a complex number cannot be multiplied by themselves


def _coalesced_reduce_scatter(
    x: Tensor, reduce_op: str, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor
) -> Tensor:
    options = dist.ReduceScatterOptions()
    options.reduceOp = REDUCE_OPS[reduce_op]
    x, into = (torch.view_as_real(each) if each.is_complex() else each for each in (x.contiguous(), out))
    parts, wholes = _members(into, lengths, 1), _members(x, lengths, ranks)
    if parts:
        group = group_named(group_name)
        register(out, group.reduce_scatter_tensor_coalesced(parts, wholes, options), group)
    return out


def _coalesced_all_gather(x: Tensor, lengths: Sequence[int], ranks: int, group_name: str, *, out: Tensor) -> Tensor:
    sizes = [length * x.element_size() for length in lengths]
    parts, wholes = _members(as_bytes(x.contiguous()), sizes, 1), _members(as_bytes(out), sizes, ranks)
    if parts:
        group = group_named(group_name)
        register(out, group.allgather_into_tensor_coalesced(wholes, parts), group)
    return out


def _members(x: Tensor, lengths: Sequence[int], ranks: int) -> list[Tensor]:
    """The part of each member in ``x``; without empty ones, of which a backend would have nothing to send."""
    return [member for member in x.split([ranks * length for length in lengths]) if member.numel()]


define_scatter(_coalesced_reduce_scatter)
define_gather(_coalesced_all_gather)

coalesced_reduce_scatter, coalesced_all_gather = ops.coalesced_reduce_scatter, ops.coalesced_all_gather

OUT_VARIANTS: dict[Any, Any] = {op.default: op.out for op in (coalesced_reduce_scatter, coalesced_all_gather)}
"""The out variant of each of these ops."""
