"""The oracle detects steps that omit a reduction, or average where they should not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from .cases import OPTIMIZERS, WIDE
from .oracle import Case, Snapshot, _step, plain_run, unequal


def local_run(case: Case, rank: int) -> list[Snapshot]:
    """Snapshots of a run without communication."""
    torch.manual_seed(0)
    objects = case.build()
    return [_step(case, case.step, objects, case.part(rank, k), k) for k in range(5)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_equals_itself(optimizer: str) -> None:
    case = replace(WIDE, optimizer=optimizer)
    for first, second in zip(plain_run(case, 2, 5), plain_run(case, 2, 5), strict=True):
        assert unequal(first, second, 0, 2) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_missing_reduction_shows_in_every_value(optimizer: str) -> None:
    case = replace(WIDE, optimizer=optimizer)
    lines = unequal(plain_run(case, 2, 5)[-1], local_run(case, 0)[-1], 0, 2)
    floats = [name for name, value in local_run(case, 0)[-1].items() if isinstance(value, torch.Tensor)]
    floats = [name for name in floats if "step[" not in name]
    assert [line.partition(": ")[0] for line in lines] == floats


def test_dtype_order_and_type_are_compared() -> None:
    one = torch.ones(())
    assert unequal({"a": one}, {"a": one.double()}, 0, 1) != []
    assert unequal({"a": one}, {"a": 1.0}, 0, 1) != []
    assert unequal({"keys": ["a", "b"]}, {"keys": ["b", "a"]}, 0, 1) != []
    assert unequal({"a": one}, {}, 0, 1) == ["a is missing"]
    assert unequal({}, {"a": one}, 0, 1) == ["a should not be there"]


def test_a_result_split_along_the_batch_is_compared_with_its_part() -> None:
    whole = {"result": torch.arange(6.0)}
    assert unequal(whole, {"result": torch.arange(3.0, 6.0)}, 1, 2) == []
    assert unequal(whole, {"result": torch.arange(3.0, 6.0)}, 0, 2) != []
