"""A compiled step computes the same bits whether its collectives overlap with compute or not."""

from __future__ import annotations

from typing import Any

import pytest

import passes
import spmd
from passes import StartEarly, WaitLate
from passes.analysis.collective_algorithms import Table
from passes.ir.collectives import is_collective, is_wait
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, compiled_run
from tests.harness.pool import Ranks

STEPS = 3
BY_MESSAGES = Table("by messages", ())  # each collective by the op of its backend


def trained(rank: int, world: int, style: Any, optimizer: str) -> tuple[list[str], list[int]]:
    """What differs between the two after each step, and for each how many nodes run between a start and its wait."""
    runs, between = [], []
    for overlaps in (True, False):
        pipeline = passes.default(table=BY_MESSAGES)
        kept = [each for each in pipeline if overlaps or not isinstance(each, (StartEarly, WaitLate))]
        case, mode = MLP((15, 40, 40, 4), 6, optimizer), spmd.DataParallel(**style)
        compiled, found = compiled_run(rank, case, STEPS, parallel_mode=mode, passes=kept)
        runs.append(found)
        between.append(flying(compiled.program))
    return all_unequal(*runs, rank, world, rtol=0.0, atol=0.0), between


def flying(program: Any) -> int:
    """For how many nodes collectives are in flight, in all."""
    count, found = 0, 0
    for node in program.graph.nodes:
        count += is_collective(node) - is_wait(node)
        found += count
    return found


@pytest.mark.parametrize(("style", "optimizer"), [
    ({"parallel_style": "replicate"}, "SGD"),
    ({"parallel_style": "fully_shard"}, "AdamW"),
    ({"parallel_style": "fully_shard", "reshard_after_forward": False}, "SGD"),
])  # fmt: skip
def test_overlap_changes_no_bit(ranks: Ranks, style: Any, optimizer: str) -> None:
    for differ, (with_overlap, without) in ranks.run(2, trained, style, optimizer):
        assert differ == []
        assert with_overlap > without
