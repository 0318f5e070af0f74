"""Merge reduce_scatters: few large messages cost less than many small ones."""

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
class BucketReduceScatter(Pass):
    """Reduce_scatters of one axis, dtype, reduction and role become one.

    What serves a unit of ``program.units`` goes together, in order of registration; of all else, a bucket closes once
    its operand has reached ``max_bytes``, the first one of gradients once it has ``first_bytes``. A collective whose
    role is unknown is left alone. Sums may be formed in another order, as a backend divides a longer buffer otherwise
    among the ranks. Leaves every result contiguous.
    """

    max_bytes: int = 25_000_000
    first_bytes: int = 1_000_000
    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """Replace each bucket, then bring the graph into order."""
        found = buckets(
            program, Kind.REDUCE_SCATTER, c10d.reduce_scatter_tensor.default, self.max_bytes, self.first_bytes
        )
        for bucket in found:
            _merge(bucket)
        settle(program.graph)
        return len(found)


def _merge(bucket: Bucket) -> None:
    call = caller(bucket)
    ranks = bucket[0].args[2]
    columns = [
        call(aten.reshape.default, operands(member)[0], [ranks, -1]) for member in bucket
    ]  # row r goes to rank r
    rows = call(aten.cat.default, columns, 1)  # [ranks, total]
    merged = call(c10d.reduce_scatter_tensor.default, rows, *bucket[0].args[1:])  # [1, total]
    merged.meta |= joined(bucket)
    flat = call(aten.view.default, call(WAIT, merged), [-1])
    shapes = [list(member.meta["val"].shape) for member in bucket]
    parts = call(aten.split_with_sizes.default, flat, [math.prod(shape) for shape in shapes])
    results = [call(aten.view.default, call(operator.getitem, parts, k), shape) for k, shape in enumerate(shapes)]
    replace_members(bucket, results)
