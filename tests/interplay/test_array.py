"""The covering array: its rows have all pairs; some run here, all by ``make interplay``; refusals are as expected."""

from __future__ import annotations

import pytest

from ..harness.fake import fake_world
from ..harness.pool import Ranks
from .array import covered, differing, pairs, refused_row, rows
from .comparing import refusal, world
from .dimensions import DIMENSIONS, REFUSED, is_possible
from .running import found_in

RUN = 4  # rows in the default run


@pytest.fixture(scope="module")
def array() -> list[dict[str, str]]:
    return rows()


def test_each_possible_pair_of_values_is_in_a_row(array: list[dict[str, str]]) -> None:
    assert all(map(is_possible, array)) and all(list(row) == list(DIMENSIONS) for row in array)
    found = set().union(*map(covered, array))
    assert found == pairs()
    values = {(name, value) for name, values in DIMENSIONS.items() for value in values}
    assert set().union(*found) == values, "a value is in no possible row"
    assert array == rows()  # on every machine


@pytest.mark.processes
@pytest.mark.parametrize("number", range(RUN))
def test_rows_compute_what_the_plain_step_computes(number: int, array: list[dict[str, str]], ranks: Ranks) -> None:
    row = array[number]
    found = found_in(ranks, row)
    assert not found, "\n".join([f"{differing(row)}", *found[:20]])


@pytest.mark.parametrize("sentence", REFUSED)
@pytest.mark.usefixtures("alone")
def test_what_is_refused_is_refused_by_that_sentence(sentence: str) -> None:
    row = refused_row(sentence)
    with fake_world(world(row)):
        assert sentence in refusal(row)
