"""Each kind of guard is needed: without it, or with a stale one, a call that changes something runs a stale program."""

from __future__ import annotations

import dataclasses

import pytest

from spmd.guards.guards import Guards

from .guards import Trial
from .manifest import GUARDS

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]

NO_CHECKS = {"described", "any_gradient", "dead", "on_release"}  # of the fields of ``Guards``


def test_each_kind_of_guard_is_in_the_manifest() -> None:
    assert {each.name for each in dataclasses.fields(Guards)} - NO_CHECKS <= {*GUARDS}


@pytest.mark.parametrize("kind", GUARDS)
def test_a_change_that_one_kind_of_guard_sees_is_missed_by_its_wrong_version(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, trial = GUARDS[kind], Trial()
    assert trial.runs_stale(), "nothing has changed, and the program still fits"
    guard.change(trial)
    assert not trial.runs_stale()
    monkeypatch.setattr(guard.owner, guard.name, guard.wrong)
    assert trial.runs_stale(), "another guard sees that change, too: this one needs a change of its own"
