"""A compiled step computes what the plain step computes on the whole batch: every optimizer, style and world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.harness.cases import NARROW, OPTIMIZERS, STYLES, WIDE
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("passes", [None, ()], ids=["default passes", "no passes"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [WIDE, NARROW], ids=["50-32-8", "15-17-3-1"])
def test_five_steps_equal_the_plain_ones(
    ranks: Ranks, case: Any, world: int, style: str, passes: Any, optimizer: str
) -> None:
    assert_agrees(ranks, world, replace(case, optimizer=optimizer), style, passes)
