"""Steps under autocast: what bf16 does to the plain step, it does to the compiled one.

The forward of each row is the plain step's, so the first loss differs as fp32 sums do. A weight's gradient is a sum
over rows, which bf16 rounds once in the plain step and once on each rank in the compiled one: the two differ by up to
one rounding of 2**-8 for the plain step and for every rank, of numbers as large as the largest of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import Case, snapshot
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks, computes, nodes_of

BF16 = torch.bfloat16
ROUNDING = 2.0**-8  # of one number in bf16


@dataclass(frozen=True)
class Inside(MLP):
    """fp32 parameters; the first layer runs twice, so that autocast has its cast weight for the second time."""

    sizes: tuple[int, ...] = (16, 16, 5)
    rows: int = 6

    def build(self) -> tuple[Any, ...]:
        model, _ = super().build()
        model.float()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        return tuple(tensor.float() for tensor in super().part(rank, step))

    @staticmethod
    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            predicted = model[1:](model[0](model[1](model[0](x))))
            assert predicted.dtype is BF16
            loss = F.mse_loss(predicted.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Accumulated(Inside):
    """A cast weight is used for several backward passes."""

    @staticmethod
    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for scale in (1.0, 0.5):
            with torch.autocast("cpu", dtype=BF16):
                losses.append(F.mse_loss(model(x * scale).float(), y))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses[1]


class PartlyOff(Inside):
    """A region in fp32 within autocast, backward included."""

    @staticmethod
    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            h = model[:2](x)
            with torch.autocast("cpu", enabled=False):
                predicted = model[2](h.float())
                assert predicted.dtype is torch.float32
                loss = F.mse_loss(predicted, y)
                loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        return loss


class Around(Inside):
    """Autocast is on where the step is called, and off in a part of it."""

    @staticmethod
    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        h = model[:2](x)
        with torch.autocast("cpu", enabled=False):
            predicted = model[2](h.float())
            assert predicted.dtype is torch.float32
            loss = F.mse_loss(predicted, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


class Called:
    """The step, called under autocast."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, *args: Any) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return self.step(*args)


def differences(rank: int, world: int, case: Case, style: str, steps: int) -> list[str]:
    """What is further from the plain step than bf16 can bring it, or of another dtype."""
    compiled = spmd.compile(parallel_mode=spmd.DataParallel(style))(case.step)
    around = Called if isinstance(case, Around) else lambda step: step
    batches = [[case.part(r, k) for r in range(world)] for k in range(steps)]
    expected = _run(case, around(case.step), [case.whole(parts) for parts in batches])
    got = _run(case, around(compiled), [parts[rank] for parts in batches])
    torch.testing.assert_close(got[0]["result"], expected[0]["result"], rtol=1e-6, atol=0)
    return [
        f"step {k}: {name}: {difference}"
        for k, (want, have) in enumerate(zip(expected, got, strict=True))
        for name in want
        if (difference := _difference(want[name], have[name], (world + 1) * ROUNDING))
    ]


def _difference(want: Any, have: Any, relative: float) -> str:
    if not isinstance(want, Tensor):
        return "" if want == have else f"expected {want!r}, got {have!r}"
    try:
        torch.testing.assert_close(have, want, rtol=0, atol=relative * float(want.abs().max()))
    except AssertionError as error:
        return str(error)
    return ""


def _run(case: Case, step: Any, batches: list[Any]) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    objects = case.build()
    return [snapshot(step(*objects, *batch), objects) for batch in batches]


CASES = [Inside(), Accumulated(), PartlyOff(), Around()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: type(case).__name__)
def test_steps_under_autocast(ranks: Ranks, case: Case, request: pytest.FixtureRequest) -> None:
    worlds = [("replicate", 2), ("fully_shard", 2), ("fully_shard", 4)]
    for style, world in worlds if request.config.getoption("--exhaustive") else [worlds[CASES.index(case) % 2]]:
        for found in ranks.run(world, differences, case, style, 5):
            assert found == []


def dtypes_of_products(compiled: spmd.CompiledStep) -> list[torch.dtype]:
    """Of each matrix product, in order."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return [node.meta["val"].dtype for node in nodes_of(compiled, *products)]


def test_a_region_without_autocast_stays_in_fp32_where_the_call_is_under_autocast() -> None:
    case = Around()
    with torch.autocast("cpu", dtype=BF16):
        compiled = compile_on_fake_ranks(2, case.step, case.build(), *case.part(0, 0))
    assert dtypes_of_products(compiled) == [BF16, torch.float32, torch.float32, torch.float32, BF16]
    compiled = compile_on_fake_ranks(2, case.step, case.build(), *case.part(0, 0))
    assert set(dtypes_of_products(compiled)) == {torch.float32}


def test_a_weight_is_cast_once_for_all_that_read_it() -> None:
    case = Inside()
    compiled = compile_on_fake_ranks(2, case.step, case.build(), *case.part(0, 0))
    _, weight = compiled.program.values()["model.0.weight"]
    casts = [user for user in weight.users if computes(user) is torch.ops.aten._to_copy.default]
    assert len(casts) == 1


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # it casts a weight once, and so misses the first update
        for _ in range(2):
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss


@pytest.mark.usefixtures("alone")
def test_a_weight_is_cast_once_in_a_region_also_if_it_is_updated_meanwhile() -> None:
    found = []
    for step in (twice, spmd.compile(twice)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            step(model, optimizer, torch.randn(4, 8))
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found)
