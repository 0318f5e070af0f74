"""The rate of communication along a mesh axis: what a partitioner estimates the cost of a collective by.

It is the alpha-beta model of message passing: a latency, and a time for each byte (R. W. Hockney, "The communication
challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994). ``Table.rate`` fits it to measurements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """``latency``: seconds of the smallest collective; ``per_byte``: seconds more for each byte that a rank sends."""

    latency: float
    per_byte: float

    def seconds(self, sent: float) -> float:
        """The cost of a collective in which every rank sends this many bytes."""
        return self.latency + self.per_byte * sent

    def is_small(self, nbytes: float) -> bool:
        """Whether a message of this size takes no longer to send than an empty one takes to arrive."""
        return self.per_byte * nbytes <= self.latency


UNMEASURED = Rate(latency=2.0**-14, per_byte=2.0**-30)
"""For an axis of which no table knows anything: 61 us, in which 64 KiB are sent at 1 GiB/s.

The ratio of the two decides along one axis, and it is right for both gloo and NCCL to an order of magnitude. Both are
powers of two, so that estimates that are equal in bytes are equal in seconds, too.
"""
