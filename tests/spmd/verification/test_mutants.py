"""Wrong passes, of the classes of published bugs in parallel trainers, are found at their stage, near their node."""

from __future__ import annotations

import pytest

from passes import Kind, Program
from tests.mutants.manifest import PUBLISHED
from tests.mutants.published import REDUCE, SCATTER, collectives, reduced_by, wait_of

from .prepared import MODES, mutated, prepared

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_wrong_pass_is_found(name: str) -> None:
    base, edit, behind = PUBLISHED[name]
    found = prepared(base).guilty(mutated(edit, behind))
    assert found is not None, "nothing differs"
    assert found.stage == "Mutant"
    assert found.what and found.difference.says


@pytest.mark.parametrize("name", MODES)
def test_a_clean_program_is_not_accused(name: str) -> None:
    assert prepared(name).guilty() is None


@pytest.mark.parametrize("base, kind, which", [("replicate", REDUCE, 2), ("fully_shard", SCATTER, 0)])
def test_the_first_wrong_node_is_named(base: str, kind: Kind, which: int) -> None:
    """The node whose value is wrong is the first one that is not what the captured program has."""
    edited = list[str]()

    def edit(program: Program) -> int:
        edited.append(wait_of(collectives(program, kind)[which]).name)
        return reduced_by(kind, "max", which)(program)

    found = prepared(base).guilty(mutated(edit))
    assert found is not None and found.node is not None
    assert found.node.name == edited[0]
    assert "loss.backward()" in found.node.meta["source"]
    assert found.difference.expected != found.difference.actual
