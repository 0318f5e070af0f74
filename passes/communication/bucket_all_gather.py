"""Merge all_gathers: few large messages cost less than many small ones."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Pass
from ..ir.collectives import Kind, c10d
from ..ir.program import Program
from .bucket_sizes import MAX_BYTES
from .bucketing import Packing, merge
from .packed import pack_flat, unpack_columns

_PACKING = Packing(Kind.ALL_GATHER, c10d.all_gather_into_tensor.default, pack_flat, unpack_columns)


@dataclass(frozen=True)
class BucketAllGather(Pass):
    """All_gathers of one axis, dtype and role become one.

    Those for a unit of ``program.units`` go together, in order of registration; of all others, a bucket closes once
    its result has reached ``max_bytes``. A collective whose role is unknown stays as it is. Leaves every result
    contiguous, in memory of its own.
    """

    max_bytes: int = MAX_BYTES

    def rewrite(self, program: Program) -> int:
        """Replace each bucket, then bring the graph into order."""
        return merge(program, _PACKING, self.max_bytes)
