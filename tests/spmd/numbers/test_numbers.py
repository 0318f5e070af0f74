"""A compiled step computes what the plain step computes on the whole batch: every optimizer, style and world.

Three styles with SGD, SGD with momentum, Adam and AdamW: all combinations. Two MLPs, passes or none, the worlds and the
forms of an optimizer (plain, foreach, fused) take turns over them, so that every two options occur together; ``pytest
--exhaustive`` runs all combinations.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from tests.harness.cases import IMPLEMENTATIONS, KINDS, NARROW, STYLES, WIDE
from tests.harness.oracle import assert_agrees
from tests.harness.pool import Ranks

CASES = {"50-32-8": WIDE, "15-17-1": NARROW}
WORLDS = (2, 4)
PASSES: dict[str, Any] = {"default passes": None, "no passes": ()}


Combination = tuple[str, int, str, str, str, str]  # case, world, style, passes, kind and form of the optimizer


def everything() -> list[Combination]:
    """All combinations."""
    return list(product(CASES, WORLDS, STYLES, PASSES, KINDS, IMPLEMENTATIONS))


def usual() -> list[Combination]:
    """Each style with each kind of optimizer; the rest takes turns, so that every two options occur together."""
    return [
        (
            list(CASES)[(k // 2 + n // 2) % 2],
            WORLDS[(k // 2 + n) % 2],
            style,
            list(PASSES)[(k + n // 2) % 2],
            kind,
            IMPLEMENTATIONS[(k + n) % 3],
        )
        for (k, style), (n, kind) in product(enumerate(STYLES), enumerate(KINDS))
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        grid = everything() if metafunc.config.getoption("--exhaustive") else usual()
        metafunc.parametrize("case, world, style, passes, optimizer", [(*rest, k + form) for *rest, k, form in grid])


def test_steps_equal_the_plain_ones(
    ranks: Ranks, case: str, world: int, style: str, passes: str, optimizer: str
) -> None:
    assert_agrees(ranks, world, replace(CASES[case], optimizer=optimizer), style, PASSES[passes])


def test_every_two_options_occur_together() -> None:
    for one, other in combinations(range(6), 2):
        assert {(c[one], c[other]) for c in usual()} == {(c[one], c[other]) for c in everything()}
