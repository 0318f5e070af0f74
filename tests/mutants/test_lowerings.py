"""What lowers a program has wrong versions: the numbers of the step, beside the plain one, find each."""

from __future__ import annotations

import pytest

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, compiled_run, plain_run

from .lowerings import Lowering
from .manifest import LOWERINGS

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]

CASE, CALLS = MLP(sizes=(6, 8, 4), rows=8, optimizer="AdamW"), 3


def is_wrong(lowering: Lowering) -> bool:
    """Whether a step that is lowered now differs from the plain one, or raises."""
    mode = spmd.DataParallel(**lowering.mode)
    try:
        _, got = compiled_run(0, CASE, CALLS, parallel_mode=mode, **lowering.options)
    except Exception:  # of whatever kind: a program that does not run is no silent one
        return True
    return bool(all_unequal(plain_run(CASE, 1, CALLS), got, 0, 1))


@pytest.mark.parametrize("name", LOWERINGS)
def test_a_wrong_lowering_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowering = LOWERINGS[name]
    monkeypatch.setattr(lowering.owner, lowering.name, lowering.wrong)
    assert is_wrong(lowering)


@pytest.mark.parametrize("mode", [{}, {"micro_batches": 2}], ids=["plain", "micro-batches"])
def test_the_right_lowering_is_not_accused(mode: dict[str, int]) -> None:
    assert not is_wrong(Lowering(None, "", print, mode=mode))
