"""Each schedule of a pipeline has wrong versions: the proof of its bundle finds them, or the numbers of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from passes.ir.bundle import Bundle
from spmd.stages.schedules import SCHEDULES
from tests.spmd.stages.test_mutants import dropped_programs, is_caught, outcome, programs_of, repeated_programs

from .manifest import SCHEDULED

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.slow]

DRAWN = 3  # of each operator


def of_other_ranks(bundle: Bundle) -> Iterator[Bundle]:
    """Each rank runs the programs of the other one."""
    yield bundle.with_orders({"step": tuple(reversed(bundle.calls["step"]))})


def backwards(bundle: Bundle) -> Iterator[Bundle]:
    """A rank runs what it should in the other order."""
    for rank, order in enumerate(bundle.calls["step"]):
        orders = [tuple(reversed(order)) if k == rank else each for k, each in enumerate(bundle.calls["step"])]
        yield bundle.with_orders({"step": tuple(orders)})


def test_each_schedule_is_in_the_manifest() -> None:
    assert {*SCHEDULED} == {*SCHEDULES}


@pytest.mark.parametrize("schedule", SCHEDULED)
def test_wrong_versions_of_a_schedule_are_caught(schedule: str) -> None:
    _, program = programs_of(**SCHEDULED[schedule], schedule=schedule)
    expected = outcome(program, program.stages)
    assert not is_caught(program, expected, program.stages)
    for operator in (dropped_programs, repeated_programs, of_other_ranks, backwards):
        wrong = [*operator(program.stages)]
        drawn = Random(f"{schedule} {operator.__name__}").sample(wrong, min(DRAWN, len(wrong)))
        assert drawn and all(is_caught(program, expected, mutant) for mutant in drawn), operator.__name__
