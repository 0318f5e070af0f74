"""Each pass has wrong versions, made by operators over what it leaves: the checker finds them, or the numbers do."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

import passes
from passes import Pass
from passes.ir.collectives import _KINDS

from . import graphs
from .manifest import COLLECTIVES, PASSES
from .passes import base_of, caught_by, communicating, outcomes

pytestmark = pytest.mark.slow


@pytest.fixture
def most(pytestconfig: pytest.Config) -> int:
    """How many operators make wrong versions: a third of them, drawn by seed, or all."""
    return len(graphs.OPERATORS) // (1 if pytestconfig.getoption("--exhaustive") else 3)


def all_passes(of: Any = Pass) -> Iterator[type[Pass]]:
    for each in of.__subclasses__():
        yield from ([each] if each.__module__.startswith("passes.") else [])
        yield from all_passes(each)


def test_each_pass_is_in_the_manifest() -> None:
    for module in pkgutil.walk_packages(passes.__path__, "passes."):
        importlib.import_module(module.name)
    assert {*all_passes()} == {*PASSES}


@pytest.mark.parametrize("which", PASSES, ids=lambda which: which.__name__)
def test_wrong_versions_of_a_pass_are_caught(which: type[Pass], most: int) -> None:
    base = base_of(PASSES[which], which)
    assert not caught_by(base, base.after), "the right version is accused"
    found = outcomes(base, graphs.touched(base.before[0], base.after[0]), which.__name__, most)
    assert any(found.values()), f"no operator makes a wrong version: {[*found]}"


# Torch's ops that programs of users may have and no pass makes, and messages, whose mutants are those of stages.
ELSEWHERE = (
    "all_reduce_ all_reduce_coalesced all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced send recv"
)


def test_each_collective_is_in_the_manifest() -> None:
    names = {op.name().partition("::")[2].partition(".")[0] for op in {*_KINDS} - {*COLLECTIVES}}
    assert names == {*ELSEWHERE.split()}


@pytest.mark.parametrize("op", COLLECTIVES, ids=str)
def test_wrong_versions_of_a_collective_are_caught(op: Any, most: int) -> None:
    which, name = COLLECTIVES[op]
    base = base_of(name, which)
    found = outcomes(base, communicating(base, op), str(op), most)
    assert sum(map(bool, found.values())) >= 2, found
