"""Merge all_gathers: few large messages cost less than many small ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from ..analysis.topological import settle
from ..base import Pass
from ..ir.collectives import WAIT, Kind, c10d, operands
from ..ir.program import Program
from .bucketing import Bucket, buckets, caller, joined, replace_members

aten = torch.ops.aten


@dataclass(frozen=True)
class BucketAllGather(Pass):
    """All_gathers of one axis, dtype and role become one.

    What serves a unit of ``program.units`` goes together, in order of registration; of all else, a bucket closes once
    its result has reached ``max_bytes``. A collective whose role is unknown is left alone. Leaves every result
    contiguous, in memory of its own.
    """

    max_bytes: int = 25_000_000

    def rewrite(self, program: Program) -> int:
        """Replace each bucket, then bring the graph into order."""
        found = buckets(program, Kind.ALL_GATHER, c10d.all_gather_into_tensor.default, self.max_bytes)
        for bucket in found:
            _merge(bucket)
        settle(program.graph)
        return len(found)


def _merge(bucket: Bucket) -> None:
    call = caller(bucket)
    tensors = [operands(member)[0] for member in bucket]
    ranks = bucket[0].args[1]
    assert isinstance(ranks, int), "the second argument is the size of the group"
    flat = call(aten.cat.default, [call(aten.reshape.default, tensor, [-1]) for tensor in tensors])  # [total]
    merged = call(c10d.all_gather_into_tensor.default, flat, *bucket[0].args[1:])  # [ranks * total]
    merged.meta |= joined(bucket)
    rows = call(aten.view.default, call(WAIT, merged), [ranks, -1])  # [ranks, total]
    # From the results, since an operand may be another bucket's new node, which has no val yet.
    sizes = [member.meta["val"].numel() // ranks for member in bucket]
    parts = call(aten.split_with_sizes_copy.default, rows, sizes, 1)  # a copy: a member's columns lie apart
    results = [
        call(aten.view.default, call(operator.getitem, parts, k), list(member.meta["val"].shape))
        for k, member in enumerate(bucket)
    ]
    replace_members(bucket, results)
