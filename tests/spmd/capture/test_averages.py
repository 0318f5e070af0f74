"""Averages of a model within the step: by hand, and by torch's AveragedModel, whose first call only copies."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

import spmd
from tests.harness.oracle import Case, all_unequal, assert_agrees, compiled_run, plain_run, random_generator
from tests.harness.pool import Ranks


def student() -> nn.Module:
    """With a buffer of each kind; nothing in it has a gradient of zero."""
    layers = [nn.Linear(15, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).double()


@dataclass(frozen=True)
class Averaged(Case):
    """``AveragedModel`` updated in the step; ``how``: one of its averages."""

    how: str = "equal"

    def build(self) -> tuple[Any, ...]:
        averages: dict[str, dict[str, Any]] = {
            "equal": {},
            "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
            "ema of all at once": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
        }
        model = student()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, optimizer, swa_utils.AveragedModel(model, **averages[self.how])

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        random = random_generator(rank, step)
        return tuple(torch.randn(6, size, generator=random, dtype=torch.float64) for size in (15, 3))

    @staticmethod
    def step(model: nn.Module, optimizer: Any, average: swa_utils.AveragedModel, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss


def programs(rank: int, world: int, case: Case, style: str) -> tuple[list[str], int, dict[str, int]]:
    """What differs, the number of programs, and the bytes of what is gathered."""
    compiled, got = compiled_run(rank, case, 5, parallel_mode=spmd.DataParallel(style))
    gathered = {row.why: row.bytes for row in compiled.report().traffic if row.kind == "all_gather"}
    return all_unequal(plain_run(case, world, 5), got, rank, world), len(compiled.programs), gathered


@pytest.mark.parametrize(
    "how, style",
    [
        ("ema", "replicate"),
        ("ema of all at once", "fully_shard"),
        pytest.param("equal", "fully_shard", marks=pytest.mark.exhaustive),
    ],
)
def test_the_first_average_copies_in_a_program_of_its_own_and_none_is_gathered(
    ranks: Ranks, how: str, style: str
) -> None:
    trained = 8 * sum(-(-len(p) // 2) * (p.numel() // len(p)) for p in student().parameters())
    for differ, count, gathered in ranks.run(2, programs, Averaged(how), style):
        assert differ == []
        assert count == 2
        assert style == "replicate" or sum(gathered.values()) == trained, "the average is not gathered"


class TeacherAndStudent(Case):
    """The teacher is frozen, in a dict with the student; both see the batch, and the teacher follows by ``lerp_``."""

    def build(self) -> tuple[Any, ...]:
        model = student()
        teacher = deepcopy(model).requires_grad_(False)
        return {"student": model, "teacher": teacher}, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def part(self, rank: int, step: int) -> dict[str, Any]:
        return {"x": torch.randn(6, 15, generator=random_generator(rank, step), dtype=torch.float64)}

    @staticmethod
    def step(models: dict[str, nn.Module], optimizer: Any, *, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = models["teacher"](x).softmax(-1)
        loss = F.cross_entropy(models["student"](x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(models["teacher"].parameters(), models["student"].parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return {"loss": loss.detach()}


@pytest.mark.parametrize(
    "style, world", [("fully_shard", 2), pytest.param("replicate", 2, marks=pytest.mark.exhaustive)]
)
def test_a_teacher_follows_its_student(ranks: Ranks, style: str, world: int) -> None:
    assert_agrees(ranks, world, TeacherAndStudent(), style)


class Counting(nn.Module):
    """Branches on a counter that is a buffer: computes differently after some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(15, 3).double()
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.linear(x) if self.steps > 2 else self.linear(x).tanh()


class AfterAWhile(TeacherAndStudent):
    """A branch on a buffer that the step writes before."""

    def build(self) -> tuple[Any, ...]:
        model = Counting()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


def test_a_branch_on_a_counter_is_two_programs(ranks: Ranks) -> None:
    assert [found[:2] for found in ranks.run(2, programs, AfterAWhile(), "replicate")] == [([], 2)] * 2
