"""Language models whose batches are padded to the longest text in them: two traces serve all lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor

import spmd
from spmd import capture_call
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

from .catalog import ENTRIES
from .examine import Style, Training
from .zoo import LENGTH

LENGTHS = (8, 6, 5)


@dataclass(frozen=True)
class Cut(Training):
    """Each batch is as long as ``LENGTHS`` says."""

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        (batch,) = super().part(rank, step)
        return ({name: _cut(value, LENGTHS[step]) for name, value in batch.items()},)


def _cut(value: Tensor, length: int) -> Tensor:
    return value[:, :length].contiguous() if value.ndim > 1 and value.shape[1] == LENGTH else value


def train(rank: int, world: int, case: Cut, style: Style) -> tuple[list[str], int]:
    """The values that differ from the plain step's, and how often the step was traced."""
    expected, traces, original = plain_run(case, world, len(LENGTHS)), 0, capture_call.capture

    def counted(*given: Any) -> Any:
        nonlocal traces
        traces += 1
        return original(*given)

    capture_call.capture = counted
    try:
        _, got = compiled_run(rank, case, len(LENGTHS), parallel_mode=spmd.DataParallel(style))
    finally:
        capture_call.capture = original
    return all_unequal(expected, got, rank, world, case.rtol, case.atol), traces


@pytest.mark.parametrize("name, style", [("GPT2", "fully_shard")])
def test_two_traces_serve_all_lengths(ranks: Ranks, name: str, style: Style) -> None:
    (entry,) = (replace(each, config={**each.config, "n_layer": 1}) for each in ENTRIES if each.name == name)
    found = ranks.run(2, train, Cut(entry, momentum=0.0), style)
    for unequal, _ in found:
        assert not unequal, "\n".join(unequal[:20])
    assert [traces for _, traces in found] == [2, 0]  # one rank captures for both
