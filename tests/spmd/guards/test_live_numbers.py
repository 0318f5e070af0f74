"""Python numbers that change from call to call become inputs: exact, with a program per value only where needed."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental import symbolic_shapes
from torch.nn import functional as F

import spmd
from tests.harness.fake import fake_world
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
    return loss * (1 + math.cos(math.pi * k / 10)) * math.sqrt(1 - 0.9 ** (k + 1)) / math.pow(w, 2) * math.exp(-w)


def takes_logarithms(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    return loss * (math.log(1 + w) + math.log(w + 1, 3) + math.log10(w + 1) + math.log2(w + 1) + math.tanh(w))


def makes_tensors(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    weights = torch.tensor([w, 1.0, k + 0.5], dtype=x.dtype) * x.new_tensor(w)
    return loss * weights.sum() * torch.as_tensor(w, dtype=x.dtype) + torch.tensor(k)


def schedules_a_momentum(loss: Tensor, x: Tensor, k: int, w: float) -> Any:
    mean, variance = x.new_zeros(4), x.new_ones(4)
    normed = F.batch_norm(x, mean, variance, training=True, momentum=1 / (w + 1))
    return loss + (mean + variance * 2).sum() * loss + normed.square().sum() * loss


Use = Callable[[Tensor, Tensor, int, float], Any]
PROGRAMS: dict[Use, int] = {
    is_only_passed: 2,
    weighs: 2,
    reads_an_attribute: 2,
    branches: 3,
    takes_a_part: 5,
    looks_up: 5,
    asks_for_the_type: 2,
    computes_outside_of_torch: 2,
    takes_logarithms: 2,
    makes_tensors: 2,
    schedules_a_momentum: 2,
}
NEEDS_VALUES = {takes_a_part, looks_up}


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


@pytest.mark.parametrize("adam", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_branch_by_the_index_of_the_batch_on_two_ranks(ranks: Ranks, adam: bool) -> None:
    assert_agrees(ranks, 2, EveryFourth(adam), "replicate" if adam else "fully_shard", steps=8)


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
    messages = ranks.run(2, rank_dependent)
    assert all("weight 0.729" in message and "1.729" in message for message in messages), messages


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


def drops(x: Tensor, rate: float) -> Tensor:
    return F.dropout(x, rate)


@pytest.mark.usefixtures("alone")
def test_a_drop_rate_on_a_schedule_has_one_program() -> None:
    step, x = spmd.compile(drops), torch.ones(200, 200)
    for rate in (0.0, 0.25, 0.5, 0.9):
        dropped = step(x, rate)
        assert abs((dropped == 0).float().mean().item() - rate) < 0.02
        torch.testing.assert_close(dropped[dropped > 0].unique(), torch.tensor([1 / (1 - rate)]))
    assert len(step.programs) == 1


class BiasCorrected(torch.optim.Optimizer):
    """Adam as most third-party optimizers write it: a Python counter, and functions of ``math`` of it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["step"] += 1
                state["mean"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                state["square"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                size = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - math.pow(beta1, state["step"]))
                parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-size)


@dataclass(frozen=True)
class ByHand(EveryFourth):
    """Trains with it; each rank passes other names and numbers of its rows, which the step does not read."""

    def build(self) -> tuple[Any, ...]:
        model = nn.Linear(4, 4).double()
        return model, BiasCorrected(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x, _, weight = super().part(rank, step)
        rows = {"x": x, "names": [f"{rank}-{step}-{k}.png" for k in range(2)], "ids": [10 * step + rank]}
        return rows, weight

    def whole(self, parts: list[Any]) -> Any:
        rows, weights = zip(*parts, strict=True)
        return {**rows[0], "x": torch.cat([each["x"] for each in rows])}, weights[0]

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: dict[str, Any], weight: float) -> Tensor:  # type: ignore[override]
        loss: Tensor = model(rows["x"]).square().mean() * weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.parametrize(
    "mode", [pytest.param("replicate", marks=pytest.mark.exhaustive), "fully_shard", {"shard_optimizer": True}]
)
def test_an_optimizer_that_counts_and_arguments_that_nothing_reads(ranks: Ranks, mode: Any) -> None:
    assert_agrees(ranks, 2, ByHand(), mode, steps=5)


def text_programs(use: Callable[[Tensor, dict[str, Any]], Any]) -> int:
    step = spmd.compile(lambda batch: use(batch["x"], batch))
    for k in range(4):
        x = torch.randn(3)
        (result, rest), want = step({"x": x, "name": f"{k}.png"}), use(x, {"x": x, "name": f"{k}.png"})
        assert torch.equal(result, want[0]) and rest == want[1]
    return len(step.programs)


def only_moves(x: Tensor, batch: dict[str, Any]) -> Any:
    return {key: each.double() if isinstance(each, Tensor) else each for key, each in batch.items()}["x"], None


@pytest.mark.usefixtures("alone")
def test_text_that_a_step_reads_is_compared() -> None:
    assert text_programs(only_moves) == 2
    assert text_programs(lambda x, batch: (x * (2 if batch["name"] == "2.png" else 1), 0)) == 4
    assert text_programs(lambda x, batch: (x * (2 if batch["name"] in ["2.png"] else 1), 0)) == 4
    assert text_programs(lambda x, batch: (x * len("".join([batch["name"]])), 0)) == 4
    assert text_programs(lambda x, batch: (x, batch["name"])) == 4


def first_call_differs(rank: int, world: int, kind: type) -> str:
    case = EveryFourth()
    x, _, _ = case.part(rank, 0)
    try:
        spmd.compile(case.step)(*case.build(), x, *((0, 0.5 + rank) if kind is float else (2 + rank, 0.5)))
    except spmd.RankMismatchError as error:
        return str(error)
    return "nothing was raised"


def test_a_number_that_differs_at_the_first_call_is_named_with_both_values(ranks: Ranks) -> None:
    for message in ranks.run(2, first_call_differs, float):
        assert "rank 0 passed weight 0.5, rank 1 1.5" in message and "shared_rng" in message
    for message in ranks.run(2, first_call_differs, int):
        assert "rank 0 passed index 2, rank 1 3" in message and "aten" not in message


@pytest.mark.usefixtures("alone")
def test_a_remainder_of_a_sum_is_read_at_each_call() -> None:
    """Of a number that is known to be positive; sympy prints torch's remainder of ``k + 1`` by 2 as ``k + 1 % 2``.

    And ``divmod`` and the like of one.
    """

    class Trainer:
        def __init__(self) -> None:
            self.calls = 0

        def step(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = x if self.calls > 3 else x * self.calls
            x = x * sum(divmod(self.calls, 3)) + sum(divmod(20, self.calls / 2)) + ~self.calls.real
            return x * 2 if self.calls % 2 == 0 else x

    plain, trainer = Trainer(), Trainer()
    compiled = spmd.compile(trainer.step)
    for _ in range(8):
        assert torch.equal(compiled(torch.ones(3)), plain.step(torch.ones(3)))
    assert len(compiled.programs) == 4


class Counts:
    """A counter, an average and a flag, of which the step asks what they are."""

    def __init__(self) -> None:
        self.calls, self.mean, self.late = 0, 0.0, False

    def step(self, x: Tensor) -> Tensor:
        assert isinstance(self.calls, int) and not isinstance(self.calls, (float, Tensor))
        assert isinstance(self.mean, (float, numbers.Number)) and isinstance(self.late, bool)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        assert isinstance(self.mean, numbers.Real) and isinstance(x.sum().item(), float)
        return x * self.calls if isinstance(self.calls, int) else x * 0


@pytest.mark.usefixtures("alone")
def test_what_a_counter_and_a_value_are_is_what_they_are_in_the_plain_step() -> None:
    plain, counts = Counts(), Counts()
    step, x = spmd.compile(counts.step), torch.arange(4.0, dtype=torch.float64)
    for _ in range(4):
        torch.testing.assert_close(step(x), plain.step(x), rtol=1e-15, atol=0)
    assert vars(counts) == pytest.approx(vars(plain)) and len(step.programs) <= 2


class Warming(Counts):
    """A counter that torch and numpy must see as the number that it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def step(self, x: Tensor) -> Tensor:
        self.model.train(self.calls < 2)
        positions = torch.arange(self.calls + 1, dtype=x.dtype)
        loss = (self.model(x) * float(np.cos(self.calls))).sum() + positions.sum()
        self.calls += 1
        return loss


@pytest.mark.usefixtures("alone")
def test_a_counter_that_takes_no_symbol_has_a_program_for_each_value() -> None:
    plain, counts = Warming(nn.Dropout(0.0)), Warming(nn.Dropout(0.0))
    step, x = spmd.compile(counts.step), torch.arange(4.0, dtype=torch.float64)
    with pytest.warns(UserWarning, match="a program for each value of"):
        for _ in range(4):
            torch.testing.assert_close(step(x), plain.step(x), rtol=1e-15, atol=0)
            assert counts.calls == plain.calls and counts.model.training == plain.model.training


class Rate:
    """A number that the user changes, and an array that the step makes of it."""

    rate, table = 1.0, np.zeros(3)


def returns_an_array(holder: Rate, x: Tensor) -> Any:
    return x * holder.rate, np.arange(3.0) * holder.rate


def keeps_an_array(holder: Rate, x: Tensor) -> Any:
    holder.table = np.arange(3.0) * holder.rate
    return x * holder.rate, None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step", [returns_an_array, keeps_an_array])
def test_arrays_that_are_computed_from_a_number_have_its_value(step: Any) -> None:
    """From the second value on, which was an input, they held symbols."""
    compiled, holder, x = spmd.compile(step), Rate(), torch.ones(2)
    for value in (1.0, 2.0, 4.0, 2.0):
        holder.rate = value
        scaled, table = compiled(holder, x)
        assert torch.equal(scaled, x * value)
        assert np.array_equal(holder.table if table is None else table, np.arange(3.0) * value)


def test_conditions_on_numbers_load_no_compiler_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the stacks in messages of its own, which nobody sees here, torch would import Inductor and its exporter."""
    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", lambda: pytest.fail("it asks for a stack"))
    model = nn.Linear(2, 2).to(FLOAT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @spmd.compile(parallel_mode=spmd.DataParallel())
    def step(model: nn.Module, x: Tensor, k: int) -> Tensor:
        loss = branches(model(x).square().sum(), x, k, 0.5)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with fake_world(1):
        for k in range(4):
            step(model, torch.ones(2, 2, dtype=FLOAT), k)
        optimizer.param_groups[0]["lr"] = 0.2
        step(model, torch.ones(2, 2, dtype=FLOAT), 4)
    assert len(step.recompiles()) > 1
