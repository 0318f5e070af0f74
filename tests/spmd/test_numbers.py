"""A compiled step computes what the plain step computes on the whole batch: every optimizer, style and world.

Both MLPs, three styles, with and without passes, SGD, SGD with momentum, Adam and AdamW: all combinations. The worlds
and the forms of an optimizer (plain, foreach, fused) take turns over them, so that each world and form of each
optimizer meets each MLP, style and set of passes; ``pytest --exhaustive`` runs every form in every world in every
combination.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.harness.cases import FORMS, KINDS, NARROW, STYLES, WIDE
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks

CASES = {"50-32-8": WIDE, "15-17-3-1": NARROW}
WORLDS = (2, 4)
PASSES: dict[str, Any] = {"default passes": None, "no passes": ()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    exhaustive = metafunc.config.getoption("--exhaustive")
    grid = [
        (case, world, style, passes, kind + form)
        for (i, case), (k, style), (m, passes), (n, kind) in product(
            enumerate(CASES), enumerate(STYLES), enumerate(PASSES), enumerate(KINDS)
        )
        for world in (WORLDS if exhaustive else [WORLDS[(i + k + m + n) % 2]])
        for form in (FORMS if exhaustive else [FORMS[(i + k + m + n // 2) % 3]])
    ]
    metafunc.parametrize("case, world, style, passes, optimizer", grid)


def test_five_steps_equal_the_plain_ones(
    ranks: Ranks, case: str, world: int, style: str, passes: str, optimizer: str
) -> None:
    assert_agrees(ranks, world, replace(CASES[case], optimizer=optimizer), style, PASSES[passes])
