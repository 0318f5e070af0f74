"""Steps that branch on values compute what they do on one device, whichever answer a call gives."""

from __future__ import annotations

import copy
import math
import re
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.cases import make_optimizer, mlp
from tests.harness.oracle import Case, Snapshot, all_unequal, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks

from .loops import LOOPS

CALLS = 20
_LARGE, _NAN = (2, 3, 9, 14, 15), (5, 11)  # calls whose targets are large, or have a NaN on one rank


@dataclass(frozen=True)
class Branching(Case):
    """One of ``LOOPS``, on targets of which some are large and some are NaN: each answer occurs, and again."""

    loop: str
    optimizer: str = "SGD momentum"

    def build(self) -> tuple[Any, ...]:
        """A model with a buffer and a number in Python."""
        model: Any = mlp(3, 5, 1)
        model.register_buffer("good", torch.zeros((), dtype=torch.int64))
        model.bad = 0
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """``x`` and ``y`` of four rows."""
        random = random_generator(rank, step)
        x, y = (torch.randn(4, size, generator=random, dtype=torch.float64) for size in (3, 1))
        y = y * 6 if step in _LARGE else y
        if step in _NAN and rank == 1:
            y[0] = torch.nan
        return x, y

    @property
    def step(self) -> Any:  # type: ignore[override]
        """The loop."""
        return next(each for each in LOOPS if each.__name__ == self.loop)


def differences(rank: int, world: int, case: Branching, mode: dict[str, Any]) -> tuple[list[str], int]:
    """A line for each difference from the plain step, and the number of programs."""
    expected = plain_run(case, world, CALLS)
    step, got = compiled_run(rank, case, CALLS, parallel_mode=spmd.DataParallel(**mode))
    return all_unequal(_as_tensors(expected), _as_tensors(got), rank, world), len(step.programs)


def _as_tensors(snapshots: list[Snapshot]) -> list[Snapshot]:
    """Floats as tensors, since they are compared up to rounding, too."""
    return [
        {
            name: torch.tensor(value, dtype=torch.float64) if type(value) is float else value
            for name, value in of.items()
        }
        for of in snapshots
    ]


_PROGRAMS = {"logs_its_loss": 1, "looks_at_each_gradient": 2, "skips_what_is_not_finite": 2, "another_loss": 2}
_MODES: tuple[dict[str, Any], ...] = (
    {"parallel_style": "replicate"},
    {"parallel_style": "fully_shard"},
    {"shard_optimizer": True},
)


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[each.__name__ for each in LOOPS])
def test_every_answer_computes_what_the_plain_step_does(ranks: Ranks, number: int) -> None:
    loop = LOOPS[number].__name__
    case = Branching(loop, ("SGD momentum", "AdamW")[number % 2])
    for lines, programs in ranks.run(2, differences, case, _MODES[number % 3]):
        assert not lines, "\n".join(lines[:12])
        assert programs == _PROGRAMS.get(loop, programs)


_IN_PARTS = ("returns_early", "clips_what_is_large", "looks_at_each_gradient", "lowers_its_rate")


@pytest.mark.costly("a program for each of three answers, on each rank")
@pytest.mark.parametrize("loop", _IN_PARTS)
def test_what_follows_from_sums_over_all_parts_may_be_asked(ranks: Ranks, loop: str) -> None:
    """Of three parts of four rows, or two; a call looks at the answer when the last of them has run."""
    number = _IN_PARTS.index(loop) % 2
    case = Branching(loop, ("SGD momentum", "AdamW")[number])
    mode = {"parallel_style": ("fully_shard", "replicate")[number], "micro_batches": (3, 2)[number]}
    for lines, programs in ranks.run(2, differences, case, mode):
        assert not lines, "\n".join(lines[:12])
        assert programs == _PROGRAMS.get(loop, 3)


def _asks_each_part(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    mean = model(x).mean()
    if mean > 0:
        return mean
    loss = (model(x) - mean - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "function, mode, message",
    [
        (LOOPS[5], {}, r"loss = F\.mse_loss.* is a sum over the whole batch that each micro-batch needs"),
        (_asks_each_part, {"statistics": "per_micro_batch"}, r"has of its own, and leaves the step as torch\.bool"),
    ],
)
def test_what_a_part_alone_knows_may_not_be_asked(function: Any, mode: dict[str, Any], message: str) -> None:
    model, optimizer = Branching("").build()
    step = spmd.compile(parallel_mode=spmd.DataParallel(micro_batches=2, **mode))(function)
    with pytest.raises(spmd.PartitionError, match=message):
        step(model, optimizer, torch.ones(4, 3).double(), torch.ones(4, 1).double())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("passes", [(), None], ids=["no passes", "default"])
def test_sums_of_the_first_parts_answer_nothing(passes: Any) -> None:
    """The first part has a negative sum, and the batch a positive one."""

    def half(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if x.mean() > 0:
            loss = loss / 2
        loss.backward()
        optimizer.step()
        return loss

    x = torch.tensor([[-1.0], [-1.0], [3.0], [3.0]], dtype=torch.float64)
    step = spmd.compile(passes=passes, parallel_mode=spmd.DataParallel(micro_batches=2))(half)
    for each in (x, -x):
        model = nn.Linear(1, 2).double()
        verdict = spmd.verify(step, model, torch.optim.SGD(model.parameters(), 0.1), each, world=1)
        assert verdict, verdict


@pytest.mark.usefixtures("alone")
def test_a_program_says_which_answer_it_is_of() -> None:
    step, (model, optimizer) = spmd.compile(LOOPS[0]), Branching("").build()
    x, y = torch.ones(2, 3).double(), torch.ones(2, 1).double()
    step(model, optimizer, x, y)
    before = model[0].weight.clone()
    step(model, optimizer, x, y * torch.nan)
    assert torch.equal(model[0].weight, before)
    first, second = step.recompiles()
    assert first.reason == "the first call"
    assert re.fullmatch(r"loops\.py:\d+: if torch\.isfinite\(loss\): is False", second.reason)
    step(model, optimizer, x, y), step(model, optimizer, x, y * torch.nan)
    assert len(step.programs) == 2


def _raises(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    if loss.isnan():
        raise ValueError("the loss is NaN")
    optimizer.step()
    return loss


def _refused(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    if loss.isnan():
        return loss * float(loss)
    optimizer.step()
    return loss


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function, error", [(_raises, ValueError), (_refused, spmd.CaptureError)])
def test_an_answer_that_cannot_be_compiled_leaves_all_as_it_was(function: Any, error: type[Exception]) -> None:
    step, (model, optimizer) = spmd.compile(function), Branching("").build()
    x, y = torch.ones(2, 3).double(), torch.ones(2, 1).double()
    step(model, optimizer, x, y)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    for _ in range(2):
        with pytest.raises(error):
            step(model, optimizer, x, y * torch.nan)
        after = model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    step(model, optimizer, x, y)
    assert len(step.programs) == 1 and not torch.equal(model[0].weight, before[0]["0.weight"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options, words", [
    ({"parallel_mode": spmd.DataParallel(bits="same")}, 'with bits="same"'),
    ({"parallel_mode": spmd.DataParallel(defer_updates=True)}, "with defer_updates=True"),
])  # fmt: skip
def test_a_step_whose_calls_begin_once_may_not_branch(options: dict[str, Any], words: str) -> None:
    model, optimizer = Branching("").build()
    with pytest.raises(spmd.CaptureError, match="it branches on the value of a tensor, which a step cannot " + words):
        spmd.compile(**options)(LOOPS[0])(model, optimizer, torch.ones(4, 3).double(), torch.ones(4, 1).double())


_library = torch.library.Library("of_this_rank", "DEF")
_library.define("number(Tensor x) -> Tensor")
_library.impl("number", lambda x: x * 0 + torch.distributed.get_rank(), "CompositeExplicitAutograd")
torch.library.register_fake("of_this_rank::number", torch.empty_like, lib=_library)


def _goes_its_own_way(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    if torch.ops.of_this_rank.number(loss.detach()) > 0.5:
        return loss
    loss.backward()
    optimizer.step()
    return loss


def unequal(rank: int, world: int) -> None:
    """A value that each rank computes in its own way."""
    model, optimizer = Branching("").build()
    before, step = copy.deepcopy(model.state_dict()), spmd.compile(_goes_its_own_way)
    for _ in range(2):
        with pytest.raises(spmd.RankMismatchError, match="ranks found different values of a tensor"):
            step(model, optimizer, torch.ones(4, 3).double(), torch.ones(4, 1).double())
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_ranks_that_would_go_different_ways_all_raise(ranks: Ranks) -> None:
    ranks.run(2, unequal)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.exhaustive), 6])
def test_each_way_is_verified_and_certified(number: int) -> None:
    case = Branching(LOOPS[number].__name__)
    step, (model, optimizer) = spmd.compile(LOOPS[number]), case.build()
    for call in (0, _LARGE[0]):
        x, y = case.whole([case.part(rank, call) for rank in range(2)])
        assert spmd.verify(step, model, optimizer, x, y, world=2)
    certificate = spmd.certify(step, model, optimizer, x, y, world=2)
    assert certificate and certificate.ways == {0: 2, 3: 3, 6: 5}[number]


def _exits(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = (model(x) - y).square().mean()
    if not math.isfinite(loss.item()):
        sys.exit(1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.costly("verified, certified and run for both answers")
@pytest.mark.usefixtures("alone")
def test_a_step_in_parts_that_ends_the_process_is_verified_and_certified() -> None:
    """The usual check of a loop: stop at a loss that is not finite."""
    step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard", micro_batches=2))(_exits)
    model, optimizer = Branching("").build()
    x, y = torch.randn(8, 3).double(), torch.randn(8, 1).double()
    assert spmd.verify(step, model, optimizer, x, y, world=2)
    assert spmd.certify(step, model, optimizer, x, y, world=2).ways == 1
    step(model, optimizer, x, y)
    before = model[0].weight.clone()
    with pytest.raises(SystemExit):
        step(model, optimizer, x, y * torch.nan)
    assert torch.equal(model[0].weight, before)


@pytest.mark.usefixtures("alone")
def test_a_call_that_does_not_compare_its_answer_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd.state.commit.first_other", lambda: None)
    case = Branching("skips_what_is_not_finite")
    _, got = compiled_run(1, case, 6)
    torch.manual_seed(0)
    model, optimizer = case.build()
    for call in range(6):
        LOOPS[0](model, optimizer, *case.part(1, call))
    assert got[-1]["module[0] 0.weight"].isnan().any() and not model[0].weight.isnan().any()


@pytest.mark.usefixtures("alone")
def test_anomaly_mode_asks_for_each_gradient_and_is_refused() -> None:
    model, optimizer = Branching("").build()
    with torch.autograd.set_detect_anomaly(True), pytest.raises(spmd.CaptureError, match="anomaly mode is on"):
        spmd.compile(LOOPS[0])(model, optimizer, torch.ones(4, 3).double(), torch.ones(4, 1).double())


@pytest.mark.usefixtures("alone")
def test_a_program_of_another_size_is_traced_for_the_answer_of_the_call_before() -> None:
    @spmd.compile
    def step(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    assert [float(step(torch.ones(size)).sum()) for size in (2, 3, 5)] == [4, 6, 10]
    assert len(step.programs) == 4  # of the first size a guess, too
    assert float(step(-torch.ones(5)).sum()) == -15 and len(step.programs) == 5


def _of_kinds(t: Tensor) -> Any:
    return t + 1 if t.sum() else t - 1, 1 if (t > 2).sum() else 2, 1 if not t.mean() else 2


def _of_items(t: Tensor) -> Any:
    v, n = t.sum().item(), (t > 1).sum().item()
    return [1 if v else 2, 1 if n else 2, v != v, v > 1 and v < 9, {"large": v > 3}, v >= -math.inf]


def _allclose(t: Tensor) -> Any:
    return t * 2 if torch.allclose(t, t.round()) else t * 3


def _grows(t: Tensor) -> Any:
    turns = 0
    while t.abs().sum() < 10 and turns < 12:
        t, turns = t * 2 + 0.1, turns + 1
    return t, turns


def _kept(t: Tensor, log: list[Any], notes: dict[str, Any]) -> Tensor:
    log.append(t.sum().item() > 3)
    notes["bad"] = t.sum().item() != t.sum().item()
    return t


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", [_of_kinds, _of_items, _allclose, _grows], ids=lambda each: each.__name__)
def test_questions_of_each_kind_are_answered(function: Any) -> None:
    step = spmd.compile(function)
    for values in ([1.0, 2.0], [0.0, 0.0], [3.0, 4.5], [math.nan, 1.0], [1.0, 2.0]):
        t = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(step(t), function(t), equal_nan=True)


@pytest.mark.usefixtures("alone")
def test_conditions_that_a_step_keeps_are_bools() -> None:
    step, ours, theirs = spmd.compile(_kept), ([], {"bad": None}), ([], {"bad": None})  # type: ignore[var-annotated]
    for values in ([1.0, 1.0], [3.0, 4.5], [math.nan, 1.0]):
        t = torch.tensor(values, dtype=torch.float64)
        step(t, *ours), _kept(t, *theirs)
        assert ours == theirs and type(ours[0][-1]) is type(ours[1]["bad"]) is bool


@pytest.mark.usefixtures("alone")
def test_a_guess_behind_which_nothing_can_be_traced_is_taken_back() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() if x.sum() > 1 else torch.zeros(())  # which has no graph
        loss.backward()
        optimizer.step()
        return loss

    model, optimizer = Branching("").build()
    plain = copy.deepcopy(model)
    other = make_optimizer("SGD momentum", plain.parameters())
    step, x, y = spmd.compile(train), torch.ones(4, 3).double(), torch.ones(4, 1).double()
    for _ in range(3):
        torch.testing.assert_close(step(model, optimizer, x, y), train(plain, other, x, y).detach())
    assert len(step.programs) == 1
    with pytest.raises(RuntimeError, match="does not require grad"):
        step(model, optimizer, -x, y)


@pytest.mark.usefixtures("alone")
def test_a_question_for_each_of_many_parameters_has_one_guess() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        is_good = all(torch.isfinite(g).all() for g in gradients) and not any(g.isnan().any() for g in gradients)
        if is_good and loss.item() < 1e6:
            optimizer.step()
        return loss

    model = mlp(*[3] * 8)
    step = spmd.compile(train)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3).double())
    assert len([*model.parameters()]) == 14 and len(step.programs) == 1
