"""Rows find faults that were real once: each is planted again, and the plainest row with its values differs.

That row differs for no other reason, and rows of the array have these values.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..harness.pool import Ranks
from .array import plain_row, rows
from .dimensions import Row
from .planted import FAULTS
from .running import checks_of, found_in

# The values that a fault takes, and a part of a line that names what differs.
ROWS: dict[str, tuple[Row, str]] = {
    "shared_passes": (
        {"style": "fully_shard", "transport": "messages", "cache": "one rank for all"},
        "step 0: module[0] blocks.1.attention.out.bias",
    ),
    "floor_in_kernels": ({"mesh": "1", "backend": "inductor", "op": "floor"}, "step 0: result"),
    "data_that_is_put_back": ({"mesh": "1", "op": "put back"}, "step 0: module[0] last.weight"),
    "deferred_data": ({"transport": "messages", "deferral": "yes", "op": "put back"}, "KeyError: 'model.last.weight'"),
    "remainder_behind_a_bound": ({"mesh": "1", "model": "branch"}, "step 3: module[0] last.weight"),
    "planned_layouts": ({"mesh": "1", "loss": "ctc"}, "step 0: module[0] last.weight"),
    "norms_of_two_layouts": ({"style": "fully_shard", "op": "channels last"}, "module[0] blocks.3.images.1.weight"),
    "replaced_while_pending": (
        {"transport": "messages", "deferral": "yes", "optimizer": "momentum", "between": "state replaced"},
        "optimizer[1] momentum_buffer",
    ),
}
VERIFIED: dict[str, tuple[Row, str]] = {
    "draw_of_the_last_part": ({"mesh": "1", "micro_batches": "3", "model": "rows alone", "op": "draw"}, "partition"),
}


def test_each_fault_has_a_row() -> None:
    assert {*ROWS, *VERIFIED} == {*FAULTS}


@pytest.mark.processes
@pytest.mark.parametrize("fault", ROWS)
def test_a_row_differs_by_its_fault_alone(ranks: Ranks, fault: str) -> None:
    values, line = ROWS[fault]
    row = plain_row(**values)
    assert found_in(ranks, row) == []
    found = found_in(ranks, row, fault)
    assert any(line in each for each in found), found[:20]


@pytest.mark.processes
@pytest.mark.parametrize("fault", VERIFIED)
def test_verify_finds_the_fault_of_a_row(ranks: Ranks, fault: str) -> None:
    values, line = VERIFIED[fault]
    row = plain_row(**values)
    assert checks_of(ranks, row)[0] == []
    found, _ = checks_of(ranks, row, fault)
    assert any(line in each for each in found), found


@pytest.mark.parametrize("fault", FAULTS)
def test_the_array_has_the_values_of_a_fault(fault: str) -> None:
    values: Any = (ROWS | VERIFIED)[fault][0]
    assert any(values.items() <= row.items() for row in rows()), "name them in TOGETHER"
