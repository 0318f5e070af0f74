"""The sentence on a peak that does not fit: where it is, what lives then, and a setting that makes that smaller."""

from __future__ import annotations

import pytest

from passes.memory.binding_peak import Settings, describe_peak
from passes.memory.peak_memory import PlannedMemory


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("activations", Settings(1, 8, False, False, 2), "set micro_batches=2, or"),
        ("activations", Settings(4, 3, True, True, 2), "set micro_batches=8 instead of 4"),
        ("activations", Settings(4, 1, True, True, 2), "a micro-batch has one row already"),
        ("activations", Settings(1, 0, True, False, 2), "a smaller batch"),
        ("gradients", Settings(4, 3, False, True, 2), 'parallel_style="fully_shard"'),
        ("gradients", Settings(4, 3, True, True, 2), 'reduce_gradients="each"'),
        ("gradients", Settings(4, 3, True, False, 2), "over more ranks"),
        ("parameters", Settings(1, 3, False, False, 1), "over more ranks"),
        ("gathered", Settings(1, 3, True, False, 2), "smaller units"),
        ("other", Settings(1, 3, True, False, 2), "a smaller batch, or take more ranks"),
    ],
)
def test_what_to_set_next(kind: str, settings: Settings, expected: str) -> None:
    roles = {kind: 6_000_000, "offloaded": 10_000, "buffers": 3_000_000}
    planned = PlannedMemory(9_010_000, roles, 0, 0, 0, 0, "mm at head", (), "backward", "train.py:3: loss.backward()")
    text = describe_peak(planned, settings)
    where = "its peak is in backward, at mm at head (train.py:3: loss.backward()), where it holds 6.00 MB of"
    assert text.startswith(f"{where} {kind} and 3.00 MB of buffers: ") and expected in text
