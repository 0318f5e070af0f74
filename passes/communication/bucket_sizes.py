"""Bucket sizes: how many bytes are communicated at once, by default and where the rate of an axis was measured.

``FormUnits`` closes the units of parameters by them, each of which is a bucket; the bucket passes close those of all
other collectives.
"""

from __future__ import annotations

from ..ir.program import Mesh
from ..ir.rates import UNMEASURED

MAX_BYTES = 25_000_000
"""A bucket closes once it has reached this size."""
FIRST_BYTES = 1_000_000
"""The first bucket of gradients, and whatever nothing hides, closes at this size, so that it can start early."""


def worth(mesh: Mesh, axis: str) -> int:
    """The bytes that are sent in the latency of a collective along an axis; 0 where that was not measured."""
    rate = next((each.rate for each in mesh.axes if each.name == axis), UNMEASURED)
    return 0 if rate == UNMEASURED else int(rate.latency / rate.per_byte)


def limits(first_bytes: int, max_bytes: int, worth: int) -> tuple[int, int]:
    """The sizes at which the first bucket and all others close, at least what is ``worth`` while.

    So latency, which grows with the number of ranks, takes at most a third of the time of a full bucket.
    """
    return max(first_bytes, worth), max(max_bytes, 2 * worth)
