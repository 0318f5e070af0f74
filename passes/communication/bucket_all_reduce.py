"""Merge all_reduces: few large messages cost less than many small ones."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..analysis.topological import settle
from ..base import Numerics, Pass
from ..ir.collectives import WAIT, Kind, c10d, operands
from ..ir.program import Program
from .bucketing import Bucket, buckets, caller, joined, replace_members

aten = torch.ops.aten


@dataclass(frozen=True)
class BucketAllReduce(Pass):
    """All_reduces of one axis, dtype, reduction and role become one.

    What serves a unit of ``program.units`` goes together, in order of registration; of all else, a bucket closes once
    it has reached ``max_bytes``, the first one of gradients once it has ``first_bytes``. A loss is never merged with
    gradients, and a collective whose role is unknown is left alone. Sums may be formed in another order, as a backend
    divides a longer buffer otherwise among the ranks. Leaves every result contiguous.
    """

    max_bytes: int = 25_000_000
    first_bytes: int = 1_000_000
    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """Replace each bucket, then bring the graph into order."""
        found = buckets(program, Kind.ALL_REDUCE, c10d.all_reduce.default, self.max_bytes, self.first_bytes)
        for bucket in found:
            _merge(bucket)
        settle(program.graph)
        return len(found)


def _merge(bucket: Bucket) -> None:
    call = caller(bucket)
    tensors = [operands(member)[0] for member in bucket]
    flat = call(aten.cat.default, [call(aten.reshape.default, tensor, [-1]) for tensor in tensors])  # [total]
    merged = call(c10d.all_reduce.default, flat, *bucket[0].args[1:])
    merged.meta |= joined(bucket)
    # A reduction has its operand's shape; the operand itself may be another bucket's new node, which has no val yet.
    shapes = [list(member.meta["val"].shape) for member in bucket]
    sizes = [math.prod(shape) for shape in shapes]
    parts = call(aten.split_with_sizes.default, call(WAIT, merged), sizes)
    results = [call(aten.view.default, call(operator.getitem, parts, k), shape) for k, shape in enumerate(shapes)]
    replace_members(bucket, results)
