"""``max_programs``: steps of many shapes keep the programs that they ran last."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import MLP
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def rows(step: spmd.CompiledStep) -> list[int]:
    """The global rows of each program that is kept."""
    return [next(i.shape[0] for i in program.inputs if i.name == "x") // 2 for program in step.programs]


def generated() -> int:
    return sum(name.startswith("<spmd") for name in linecache.cache)


def test_the_program_run_longest_ago_goes_with_its_code() -> None:
    with fake_world(2):
        model, step = nn.Linear(3, 4), spmd.compile(evaluate, max_programs=2)
        for size in (2, 3, 2, 4):  # 3 goes, since 2 was run after it
            step(model, torch.ones(size, 3))
        assert rows(step) == [2, 4]
        before = generated()
        step(model, torch.ones(3, 3))
        assert rows(step) == [4, 3] and generated() == before
        step(model, torch.ones(4, 3))
        assert rows(step) == [4, 3], "what is kept is not compiled again"


def test_programs_of_models_that_are_gone_count_until_they_go() -> None:
    with fake_world(2):
        model, step = nn.Linear(3, 4), spmd.compile(evaluate, max_programs=2)
        step(model, torch.ones(2, 3))
        step(nn.Linear(3, 4), torch.ones(2, 3))
        step(model, torch.ones(3, 3))  # the first goes, whether or not the model of the second is known to be gone
        step(model, torch.ones(2, 3))
        assert step.program is not None and step.program.name == "evaluate/program-3"


class Lengths(MLP):
    """Two sizes of batches in turn."""

    def part(self, rank: int, step: int) -> Any:
        x, y = super().part(rank, step)
        return x[: 2 + step % 2], y[: 2 + step % 2]


def test_programs_that_come_and_go_have_the_numbers_of_the_plain_step(ranks: Ranks) -> None:
    for found in ranks.run(2, with_one_program):
        assert found == []


def with_one_program(rank: int, world: int) -> list[str]:
    case = Lengths(optimizer="SGD momentum", rows=4)
    step, got = compiled_run(rank, case, 3, parallel_mode=spmd.DataParallel("fully_shard"), max_programs=1)
    assert len(step.programs) == 1
    return all_unequal(plain_run(case, world, 3), got, rank, world)


@pytest.mark.parametrize("given, error", [(0, ValueError), (True, TypeError), ("2", TypeError)])
def test_what_is_no_number_of_programs_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_programs"):
        spmd.compile(evaluate, max_programs=given)
