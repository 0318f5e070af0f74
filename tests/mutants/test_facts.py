"""Each fact of a call by which its cached entry is found is needed: without it two calls that differ have one key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spmd.cache.trainer import Trainer
from tests.spmd.cache.trainer import trainer as trainer

from .facts import Call
from .manifest import FACTS

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]


def test_each_fact_is_in_the_manifest(trainer: Trainer, tmp_path: Path) -> None:
    assert {*Call().facts(trainer, tmp_path / "cache")} == {*FACTS}


@pytest.mark.parametrize("name", FACTS)
def test_a_change_shows_in_its_fact(name: str, trainer: Trainer, tmp_path: Path) -> None:
    fact, folder = FACTS[name], tmp_path / "cache"
    before, after = fact.of.facts(trainer, folder), fact.call.facts(trainer, folder)
    assert fact.of.facts(trainer, folder) == before, "the same call has other facts"
    assert {key for key in before if before[key] != after[key]} == {name, *fact.also}
