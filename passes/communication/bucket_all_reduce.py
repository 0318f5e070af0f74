"""Merge all_reduces: few large messages cost less than many small ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Numerics, Pass
from ..ir.collectives import Kind, c10d
from ..ir.program import Program
from .bucket_sizes import FIRST_BYTES, MAX_BYTES
from .bucketing import Packing, merge
from .packed import pack_flat, unpack_flat

_PACKING = Packing(Kind.ALL_REDUCE, c10d.all_reduce.default, pack_flat, unpack_flat)


@dataclass(frozen=True)
class BucketAllReduce(Pass):
    """All_reduces of one axis, dtype, reduction and role become one.

    Those for a unit of ``program.units`` go together, in order of registration; of all others, a bucket closes once
    it has reached ``max_bytes``, the first one of gradients once it has ``first_bytes``. A loss is never merged with
    gradients, and a collective whose role is unknown stays as it is. Sums may be formed in another order, as a backend
    divides a longer buffer otherwise among the ranks. Leaves every result contiguous.
    """

    max_bytes: int = MAX_BYTES
    first_bytes: int = FIRST_BYTES
    numerics: ClassVar[Numerics] = "reassociates"

    def rewrite(self, program: Program) -> int:
        """Replace each bucket, then bring the graph into order."""
        return merge(program, _PACKING, self.max_bytes, self.first_bytes)
