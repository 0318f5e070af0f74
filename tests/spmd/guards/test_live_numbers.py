"""Python numbers that change from call to call become inputs: exact, with a program per value only where needed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

FLOAT = torch.float64


class Schedule:
    """A plain object whose number the loop changes."""

    epoch = 0


SCHEDULE = Schedule()


def is_only_passed(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss, k


def weighs(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * (w + 0.5**k) * min(1.0, (k + 1) / 3)


def reads_an_attribute(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * (1 + SCHEDULE.epoch)


def branches(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * 2 if k % 3 == 0 else loss


def takes_a_part(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * x[: k + 1].abs().sum()


def looks_up(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * {"0": 1.0, "1": 3.0}.get(str(k), 2.0)


def asks_for_the_type(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * (3.0 if isinstance(w, float) else 1.0)


def computes_outside_of_torch(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * (1 + math.cos(math.pi * k / 10))


Use = Callable[[Tensor, Tensor, int, float], Any]
PROGRAMS: dict[Use, int] = {
    is_only_passed: 2,
    weighs: 2,
    reads_an_attribute: 2,
    branches: 3,
    takes_a_part: 5,
    looks_up: 5,
    asks_for_the_type: 5,
    computes_outside_of_torch: 5,
}
NEEDS_VALUES = {takes_a_part, looks_up, asks_for_the_type, computes_outside_of_torch}


def run(use: Use, decorate: Callable[[Any], Any], calls: int) -> tuple[list[Any], Any]:
    """Results and parameters after each call, and the step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, k: int, w: float) -> Any:
        result = use(model(x).square().mean(), x, k, w)
        (result[0] if isinstance(result, tuple) else result).backward()
        optimizer.step()
        optimizer.zero_grad()
        return result

    made, found = decorate(step), []
    for k in range(calls):
        SCHEDULE.epoch = k
        result = made(model, optimizer, torch.randn(8, 4, generator=random_generator(0, k), dtype=FLOAT), k, 1.0 + k)
        found.append((result, [parameter.detach().clone() for parameter in model.parameters()]))
    return found, made


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("use", PROGRAMS)
def test_the_plain_step_s_numbers_with_few_programs(use: Use) -> None:
    want, _ = run(use, lambda step: step, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got, step = run(use, spmd.compile, 5)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    assert len(step.programs) == PROGRAMS[use]
    warned = [str(each.message) for each in caught if "a program for each value of" in str(each.message)]
    assert bool(warned) == (use in NEEDS_VALUES)


@dataclass(frozen=True)
class EveryFourth(Case):
    """Steps by the index of the batch, and weighs the loss by it."""

    adam: bool = False

    def build(self) -> tuple[Any, ...]:
        model = nn.Linear(4, 4).double()
        make = torch.optim.Adam if self.adam else torch.optim.SGD
        return model, make(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return torch.randn(6, 4, generator=random_generator(rank, step), dtype=FLOAT) + rank, step, 0.9**step

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, index: int, weight: float) -> Tensor:
        loss: Tensor = model(x).square().mean() * weight
        loss.backward()
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("adam", [False, True])
def test_a_branch_by_the_index_of_the_batch_on_two_ranks(ranks: Ranks, adam: bool) -> None:
    assert_agrees(ranks, 2, EveryFourth(adam), "fully_shard" if adam else "replicate", steps=8)


def rank_dependent(rank: int, world: int) -> str:
    """Calls with a number that is the same on all ranks first, and then differs."""
    case = EveryFourth()
    objects, step = case.build(), spmd.compile(case.step)
    for k in range(3):
        step(*objects, *case.part(rank, k))
    x, index, weight = case.part(rank, 3)
    try:
        step(*objects, x, index, weight + rank)
    except spmd.RankMismatchError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_with_other_numbers_raise_and_name_them(ranks: Ranks) -> None:
    assert all("weight = " in message for message in ranks.run(2, rank_dependent))


class Counting(nn.Module):
    """Counts its calls, and does with the count what ``use`` does."""

    def __init__(self, use: Callable[[int], Any]) -> None:
        super().__init__()
        self.use, self.count = use, 0

    def forward(self, x: Tensor) -> Tensor:
        self.use(self.count)
        self.count += 1
        return x.sum()


def warned_of(use: Callable[[int], Any]) -> list[str]:
    """The warnings of three calls about a program for each value."""
    step, model = spmd.compile(lambda model, x: model(x)), Counting(use)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            step(model, torch.ones(2))
    return [str(each.message) for each in caught if "a program for each value" in str(each.message)]


@pytest.mark.usefixtures("alone")
def test_a_count_that_is_shown_as_text_is_named_at_the_second_program(capsys: pytest.CaptureFixture[str]) -> None:
    (warning,) = warned_of(lambda count: print(f"call {count}"))
    assert "each value of model.count, which has changed" in warning and "print the number itself" in warning
    assert capsys.readouterr().out == "call 0\ncall 1\ncall 2\n"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("use", [lambda count: print("call", count), lambda count: count == 0])
def test_a_count_that_is_printed_or_compared_is_not(use: Callable[[int], Any]) -> None:
    assert warned_of(use) == []


def views_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(4, -1, heads).cumsum(1)


def views_heads_and_their_length(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, 4 // heads)).cumsum(2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plain", [views_heads, views_heads_and_their_length])
def test_a_number_that_is_a_size_of_a_view_compiles_a_program_for_each_value(plain: Any) -> None:
    step, x = spmd.compile(plain), torch.randn(4, 5, 4)
    with pytest.warns(UserWarning, match="a program for each value of heads"):
        for heads in (2, 4, 2, 1):
            torch.testing.assert_close(step(x, heads), plain(x, heads))
    assert len(step.programs) == 3


def views_rows(x: Tensor, rows: int) -> Tensor:
    return x.view(rows, -1).cumsum(1)


@pytest.mark.usefixtures("alone")
def test_a_number_that_is_the_size_of_an_argument_changes_with_it() -> None:
    step = spmd.compile(views_rows)
    with pytest.warns(UserWarning, match="each value of rows"), pytest.warns(UserWarning, match="each size of dim 0"):
        for rows in (4, 6, 4, 3):
            x = torch.randn(rows, 5, 4)
            torch.testing.assert_close(step(x, rows), views_rows(x, rows))


def counts_from(x: Tensor, first: int) -> Tensor:
    return x * torch.arange(first, first + 4)


@pytest.mark.usefixtures("alone")
def test_a_range_may_begin_at_a_number() -> None:
    step, x = spmd.compile(counts_from), torch.randn(3, 4)
    for first in (1, 2, 3, 0):
        torch.testing.assert_close(step(x, first), counts_from(x, first))
    assert len(step.programs) == 2
