"""Every option that a rule claims is right, and those that matter are there."""

from __future__ import annotations

import pytest

from .engine import Sample, check
from .samples import samples


@pytest.mark.parametrize("sample", samples(), ids=str)
def test_options_are_right(sample: Sample) -> None:
    """On 2, 3 and 4 ranks."""
    for size in (2, 3, 4):
        check(sample, size)
