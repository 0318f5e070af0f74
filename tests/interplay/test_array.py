"""The covering array: its rows have all pairs; some run here, all by ``make interplay``; refusals are as expected.

Which rows run here changes from commit to commit: ``INTERPLAY_SEED`` says which. One that differs is run on the commit
before, too, and fails the test if that has not the same difference.
"""

from __future__ import annotations

import pytest

from ..harness.fake import fake_world
from ..harness.pool import RankError, Ranks
from .array import covered, pairs, refused_row, rows, rows_of_triples, rows_within
from .comparing import refusal
from .dimensions import DIMENSIONS, REFUSED, Row, is_possible
from .meshes import world
from .running import found_in, is_on_two_hosts
from .seeds import ROOT, SECONDS, seed
from .verdict import excuse, sentence


def test_each_possible_pair_of_values_is_in_a_row() -> None:
    array = rows()
    assert all(map(is_possible, array)) and all(list(row) == list(DIMENSIONS) for row in array)
    found = set().union(*map(covered, array))
    assert found == pairs()
    values = {(name, value) for name, values in DIMENSIONS.items() for value in values}
    assert set().union(*found) == values, "a value is in no possible row"


def test_rows_of_triples_are_those_of_their_seed() -> None:
    """Workers of a run make them each for itself."""
    few = rows_of_triples(3, 20)
    assert few == rows_of_triples(3, 30)[:20] and few != rows_of_triples(4, 20)
    assert all(map(is_possible, few)) and all(list(row) == list(DIMENSIONS) for row in few)


@pytest.mark.parametrize("seed", range(5))
def test_some_rows_fit_into_the_time_of_the_default_run(seed: int) -> None:
    assert 2 <= len(rows_within(seed, SECONDS)) <= 10 and not rows_within(seed, 1.0)


@pytest.mark.processes
@pytest.mark.parametrize("row", [pytest.param(row, id=str(n)) for n, row in enumerate(rows_within(seed(), SECONDS))])
def test_rows_compute_what_the_plain_step_computes(row: Row, request: pytest.FixtureRequest) -> None:
    pool: Ranks = request.getfixturevalue("hosts" if is_on_two_hosts(row) else "ranks")
    try:
        found = found_in(pool, row)
    except RankError as error:
        found = [f"raised: {error}"]
    if found and (reason := excuse(ROOT, row, found)):
        pytest.xfail(reason)
    assert not found, sentence(row, found)


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.usefixtures("alone")
def test_what_is_refused_is_refused_by_that_sentence(words: str) -> None:
    row = refused_row(words)
    with fake_world(world(row)):
        assert words in refusal(row)
