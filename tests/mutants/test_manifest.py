"""The manifest is one: each of its tests is there, takes its mutants from it, and no operator of graphs is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from .manifest import MANIFEST

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", MANIFEST)
def test_each_kind_has_things_operators_and_a_test(kind: str) -> None:
    section = MANIFEST[kind]
    assert len(section.things) >= 4 and section.operators and section.caught_by
    text = (TESTS / section.test).read_text()
    assert "def test_" in text


def test_the_operators_are_those_of_wrong_passes() -> None:
    assert {*MANIFEST["pass"].operators} == {"dropped", "stale", "other axis", "other rank", "off by one", "swapped"}
