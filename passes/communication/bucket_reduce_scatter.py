"""Merge reduce_scatters: few large messages cost less than many small ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..base import Numerics, Pass
from ..ir.collectives import Kind, c10d
from ..ir.program import Program
from .bucket_sizes import FIRST_BYTES, MAX_BYTES
from .bucketing import Packing, merge
from .packed import Bucket, Call, pack_columns, unpack_flat

aten = torch.ops.aten


def _unpack(call: Call, row: fx.Node, bucket: Bucket) -> list[fx.Node]:
    return unpack_flat(call, call(aten.view.default, row, [-1]), bucket)  # [1, total] -> [total]


_PACKING = Packing(Kind.REDUCE_SCATTER, c10d.reduce_scatter_tensor.default, pack_columns, _unpack)


@dataclass(frozen=True)
class BucketReduceScatter(Pass):
    """Reduce_scatters of one axis, dtype, reduction and role become one.

    Those for a unit of ``program.units`` go together, in order of registration; of all others, a bucket closes once
    its operand has reached ``max_bytes``, the first one of gradients once it has ``first_bytes``. A collective whose
    role is unknown stays as it is. Sums may be formed in another order, as a backend divides a longer buffer otherwise
    among the ranks. Leaves every result contiguous.
    """

    max_bytes: int = MAX_BYTES
    first_bytes: int = FIRST_BYTES
    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """Replace each bucket, then bring the graph into order."""
        return merge(program, _PACKING, self.max_bytes, self.first_bytes)
