"""Each pass has wrong versions, made by operators over what it leaves: the checker finds them, or the numbers do."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

import passes
from passes import Pass

from . import graphs
from .manifest import PASSES
from .passes import base_of, caught_by, mutants

pytestmark = pytest.mark.slow

TRIED = 6  # of an operator, until one is caught: others may change no number


def all_passes(of: Any = Pass) -> Iterator[type[Pass]]:
    for each in of.__subclasses__():
        yield from ([each] if each.__module__.startswith("passes.") else [])
        yield from all_passes(each)


def test_each_pass_is_in_the_manifest() -> None:
    for module in pkgutil.walk_packages(passes.__path__, "passes."):
        importlib.import_module(module.name)
    assert {*all_passes()} == {*PASSES}


@pytest.mark.parametrize("which", PASSES, ids=lambda which: which.__name__)
def test_wrong_versions_of_a_pass_are_caught(which: type[Pass]) -> None:
    base, found = base_of(PASSES[which], which), dict[str, str]()
    assert not caught_by(base, base.after), "the right version is accused"
    for operator in graphs.OPERATORS:
        for mutant in islice(mutants(which, PASSES[which], operator), TRIED):
            found[operator] = caught_by(base, mutant.programs)
            if found[operator]:
                break
            assert not base.is_wrong(mutant.programs), f"{operator} at {mutant.node} changes numbers, and none says so"
    assert any(found.values()), f"no operator makes a wrong version: {[*found]}"
