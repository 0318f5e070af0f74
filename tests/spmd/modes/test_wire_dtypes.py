"""``reduce_dtype`` and ``gather_dtype``: the values that are rounded, the bounds of the error, the exact values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.fake import fake_world
from tests.harness.oracle import Snapshot, all_unequal, compiled_run, snapshot
from tests.harness.pool import Ranks
from tests.spmd.capture.test_optimizers import With

pytestmark = pytest.mark.slow

BF16, FP16 = torch.bfloat16, torch.float16
IN_PARTS = {"parallel_style": "replicate", "shard_optimizer": True}


# Gradients: a bound


@dataclass(frozen=True)
class Inner(MLP):
    """A loss that is linear in the weights, which start at zero: what the weights are does not change a gradient."""

    sizes: tuple[int, ...] = (15, 7)
    rows: int = 5

    def build(self) -> tuple[Any, ...]:
        model = nn.Linear(*self.sizes).double()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) * y).sum(1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def shares(case: Inner, world: int, step: int) -> list[list[Tensor]]:
    """For each rank its shares of the gradients: those of its rows, divided by the global count."""
    found = []
    for rank in range(world):
        model, _ = case.build()
        x, y = case.part(rank, step)
        ((model(x) * y).sum(1).mean() / world).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return found


def reduced(rank: int, world: int, mode: dict[str, Any], steps: int = 3) -> list[str]:
    """What is wrong with the weights after each step.

    With a learning rate of 1, the weights are minus the sum of all gradients. Each share is rounded at most ``world``
    times, once when it is cast and once in each sum: to within a factor 1 + u, or to within half of the smallest
    number. What is summed in fp64 over steps is exact to 1e-15.
    """
    case, dtype = Inner(), mode["reduce_dtype"]
    u, smallest = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    _, got = compiled_run(rank, case, steps, parallel_mode=spmd.DataParallel(**mode))
    wrong, names = [], [name for name, _ in case.build()[0].named_parameters()]
    sums = [torch.zeros_like(parameter) for parameter in case.build()[0].parameters()]
    bounds = [torch.zeros_like(total) for total in sums]
    for k in range(steps):
        for n, name in enumerate(names):
            each = [share[n] for share in shares(case, world, k)]
            weight = got[k][f"module[0] {name}"]
            sums[n] -= sum(each)
            bounds[n] += ((1 + u) ** world - 1) * sum(share.abs() for share in each) + world * smallest / 2
            if not ((weight - sums[n]).abs() <= bounds[n] + 1e-14).all():
                wrong.append(f"step {k}: {name} is further off than {bounds[n].max()}")
            if k == 0 and not torch.equal(weight, weight.to(dtype).double()):
                wrong.append(f"{name} was not reduced in {dtype}")
    return wrong


@pytest.mark.parametrize("world, mode", [
    (2, {"reduce_dtype": BF16}),
    (4, {"reduce_dtype": FP16}),
    (4, {"parallel_style": "fully_shard", "reduce_dtype": BF16}),
    (2, IN_PARTS | {"reduce_dtype": FP16}),
])  # fmt: skip
def test_a_gradient_is_rounded_once_for_each_share_and_sum(ranks: Ranks, world: int, mode: dict[str, Any]) -> None:
    assert ranks.run(world, reduced, mode) == [[]] * world


# Parameters: the numbers


def rounded(parameter: Tensor) -> Tensor:
    """What is gathered."""
    return parameter.to(BF16).to(parameter.dtype)


def by_hand(case: MLP, world: int, steps: int, in_parts: bool) -> tuple[list[Snapshot], list[Tensor]]:
    """The run in one process, and its parameters at the end: gradients at what ranks read, updates of exact parameters.

    Where each rank updates a part, all hold what was gathered.
    """
    torch.manual_seed(0)
    model, optimizer = case.build()
    seen = []
    for k in range(steps):
        loss = sum(share_of(model, case, rank, world, k) for rank in range(world))
        optimizer.step()
        model.zero_grad()
        parameters = values(model)
        if in_parts:
            put(model, [rounded(parameter) for parameter in parameters])
        seen.append(snapshot(loss, (model, optimizer)))
        put(model, parameters)
    return seen, values(model)


def share_of(model: nn.Module, case: MLP, rank: int, world: int, step: int) -> Tensor:
    """A rank's share of the loss; its share of the gradients is added to theirs."""
    parameters = values(model)
    put(model, [rounded(parameter) for parameter in parameters])
    x, y = case.part(rank, step)
    loss = F.mse_loss(model(x), y) / world
    loss.backward()
    put(model, parameters)
    return loss.detach()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def put(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


@dataclass(frozen=True)
class Shown(With):
    """Hands out what it builds."""

    built: list[Any] = field(default_factory=list)

    def build(self) -> tuple[Any, ...]:
        self.built[:] = super().build()
        return tuple(self.built)


def gathered(rank: int, world: int, optimizer: str, mode: dict[str, Any]) -> list[str]:
    case = Shown(sizes=(14, 8, 4), optimizer=optimizer)
    expected, exact = by_hand(case, world, 4, mode.get("shard_optimizer", False))
    _, got = compiled_run(rank, case, 4, parallel_mode=spmd.DataParallel(**mode, gather_dtype=BF16))
    held = [got[-1][f"module[0] {name}"] for name, _ in case.built[0].named_parameters()]
    assert not mode.get("shard_optimizer") or all(torch.equal(each, rounded(each)) for each in held)
    states = zip(spmd.state_dict(case.built[0]).values(), exact, strict=True)
    wrong = [f"parameter {k}" for k, (one, two) in enumerate(states) if not torch.allclose(one, two, 1e-9, 1e-10)]
    return all_unequal(expected, got, rank, world) + wrong


@pytest.mark.parametrize("optimizer, mode", [
    ("AdamW", {"parallel_style": "fully_shard"}),
    # Its update reads norms of parameters.
    pytest.param("Adafactor", {"parallel_style": "fully_shard"}, marks=pytest.mark.exhaustive),
    pytest.param("AdamW", IN_PARTS, marks=pytest.mark.exhaustive),
    ("Adafactor", IN_PARTS),
])  # fmt: skip
def test_parameters_are_read_rounded_and_updated_exactly(ranks: Ranks, optimizer: str, mode: dict[str, Any]) -> None:
    assert ranks.run(2, gathered, optimizer, mode) == [[]] * 2


# What is sent


class Normed(MLP):
    """Batch statistics, a norm of gradients, a loss: sums that stay as they are."""

    dtype = torch.float64

    def build(self) -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(15, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(self.dtype)
        return model, torch.optim.SGD(model.parameters())

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm


class InHalf(Normed):
    """Nothing in it is wider than what is sent."""

    dtype = BF16


def report_of(case: Normed, **options: Any) -> Any:
    """The report of the step without passes, on four ranks that are not there."""
    x, y = torch.randn(6, 15, dtype=case.dtype), torch.randn(6, 4, dtype=case.dtype)
    with fake_world(4):
        step = spmd.compile(parallel_mode=spmd.DataParallel(**options), passes=())(case.step)
        step(*case.build(), x, y)
    return step.report()


BOTH = {"reduce_dtype": BF16, "gather_dtype": FP16}
COUNT = 6  # parameters of ``Normed``
EXACT = 8 * (2 * 15 + 2 + 2 + 2 + 8 + 1)  # bytes of a quarter of each


@pytest.mark.parametrize("options, narrow", [
    ({"reduce_dtype": BF16}, {("all_reduce", "gradient", "bfloat16"): COUNT}),
    (
        {"parallel_style": "fully_shard", **BOTH},
        {("reduce_scatter", "gradient", "bfloat16"): COUNT, ("all_gather", "parameter", "float16"): COUNT},
    ),
    (
        IN_PARTS | BOTH,
        {("reduce_scatter", "gradient", "bfloat16"): COUNT, ("all_gather", "parameter", "float16"): COUNT},
    ),
], ids=["replicate", "fully_shard", "in parts"])  # fmt: skip
def test_gradients_and_parameters_are_sent_narrow_and_nothing_else(
    options: dict[str, Any], narrow: dict[tuple[str, str, str], int]
) -> None:
    rows = report_of(Normed(), **options).traffic
    assert {(row.kind, row.role, row.dtype): row.count for row in rows if row.dtype != "float64"} == narrow
    assert {row.role for row in rows if row.dtype == "float64"} == {"activation", "result"}


def test_bytes_are_those_of_the_narrow_dtype_and_the_report_lists_rounded_values() -> None:
    wide, narrow = report_of(Normed(), **IN_PARTS), report_of(Normed(), **IN_PARTS, **BOTH)
    for kind in ("reduce_scatter", "all_gather"):
        assert narrow.bytes(kind) * 4 == wide.bytes(kind)
    assert not wide.notes
    assert narrow.notes == (
        f"reduce_dtype=torch.bfloat16 rounds {COUNT} of {COUNT} gradients before they are sent",
        f"gather_dtype=torch.float16 rounds {COUNT} of {COUNT} parameters before they are sent",
        f"each rank keeps the parts of {COUNT} parameters that it updates exact ({EXACT} bytes), beside what ranks "
        "sent each other of them, which the model holds",
    )


def test_micro_batches_that_count_labels_ahead_have_master_copies_too() -> None:
    """The sum over all rows, which each part divides by, is a program of its own: it updates no parameter."""

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = ((model(x) - y).square() * (y > 0)).sum() / (y > 0).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, x, y = nn.Linear(6, 4).double(), torch.randn(8, 6).double(), torch.randn(8, 4).double()
    mode = spmd.DataParallel(**IN_PARTS, gather_dtype=torch.float32, micro_batches=2)
    compiled = spmd.compile(step, parallel_mode=mode)
    found = spmd.verify(compiled, model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, world=2)
    assert found, found


def test_values_that_are_no_wider_are_sent_unchanged() -> None:
    plain, asked = report_of(InHalf(), **IN_PARTS), report_of(InHalf(), **IN_PARTS, reduce_dtype=BF16)
    assert asked.traffic == plain.traffic and asked.notes == plain.notes
    with pytest.raises(spmd.PlacementError, match=r"got torch\.float16 for torch\.bfloat16"):
        report_of(InHalf(), **IN_PARTS, **BOTH)


def test_the_repr_of_a_mode_has_its_options() -> None:
    assert repr(spmd.DataParallel()) == "DataParallel('replicate')"
    mode = spmd.DataParallel(**IN_PARTS, gather_dtype=BF16)
    assert repr(mode) == "DataParallel('replicate', shard_optimizer=True, gather_dtype=torch.bfloat16)"


@pytest.mark.parametrize("options, message", [
    ({"reduce_dtype": torch.int8}, r"expected reduce_dtype to be one of torch.bfloat16, .* or None, got torch.int8"),
    ({"gather_dtype": "bf16", "parallel_style": "fully_shard"}, "expected gather_dtype .* got 'bf16'"),
    ({"gather_dtype": BF16}, r'"replicate" gathers no parameters, unless it has shard_optimizer=True'),
])  # fmt: skip
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spmd.DataParallel(**options)
