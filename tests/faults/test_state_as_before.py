"""A call that fails while it runs, on one rank, leaves state of each kind that it writes as it was, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import spmd
from tests.harness.oracle import Case, Snapshot, all_unequal, plain_run, random_generator, snapshot
from tests.harness.pool import Ranks

from . import faults
from .faults import Fault, Injected, arm
from .test_failed_calls import communicating

IDS, WIDTH, ROWS, LENGTH = 9, 6, 4, 4


class Averaged(torch.optim.Optimizer):
    """Steps by a running mean of gradients, which is another tensor after each step, and counts in a number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                mean = state["mean"] * 0.9 + parameter.grad if "mean" in state else parameter.grad.clone()
                state["mean"], state["steps"] = mean, state.get("steps", 0) + 1
                parameter -= group["lr"] * mean


class Words(nn.Module):
    """Embeds ids, of which one out of range fails while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(IDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """(rows, length) -> (rows, length, 2)."""
        return self.out(torch.tanh(self.mix(self.table(ids))))


@dataclass(frozen=True)
class Cleared(Case):
    """Gradients are cleared at the start of a step, and stay after it."""

    def build(self) -> tuple[Any, ...]:
        """A model and its optimizer."""
        model = Words().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        """Ids and targets."""
        random = random_generator(rank, step)
        ids = torch.randint(IDS, (ROWS, LENGTH), generator=random)
        return ids, torch.randn(ROWS, LENGTH, 2, generator=random, dtype=torch.float64)

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, update."""
        optimizer.zero_grad()
        loss = F.mse_loss(model(ids), y)
        loss.backward()
        optimizer.step()
        return loss


@dataclass(frozen=True)
class Rich(Cleared):
    """A step that writes what a step can write: buffers, attributes, lists, groups, and state that it makes anew."""

    def build(self) -> tuple[Any, ...]:
        """A model with state of many kinds."""
        model = Words().double()
        model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        model.hidden = torch.zeros(WIDTH, dtype=torch.float64)
        model.calls, model.log = 0, [0.0, 0.0]
        model.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        return model, Averaged([p for p in model.parameters() if p.requires_grad])

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, y: Tensor) -> Tensor:
        """Writes early, and fails late where an id is out of range."""
        optimizer.zero_grad()
        model.calls += 1
        model.seen.add_(1)
        model.hidden = model.hidden * 0.5 + 1
        model.log[1] = model.hidden.sum()
        loss = F.mse_loss(model(ids) + model.hidden.mean() + 0.0 * torch.rand_like(y), y)
        loss.backward()
        optimizer.step()
        model.last = loss.detach()
        optimizer.param_groups[0]["lr"] *= 0.9
        return loss


class LeavesGradients(Cleared):
    """Gradients are all that a call writes."""

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, y: Tensor) -> Tensor:
        """Forward and backward."""
        optimizer.zero_grad()
        loss = F.mse_loss(model(ids), y)
        loss.backward()
        return loss


def everything(result: Any, objects: tuple[Any, ...]) -> Snapshot:
    """What a user can see, with the attributes of the model."""
    model = objects[0]
    names = [name for name in ("hidden", "calls", "log", "last") if hasattr(model, name)]
    found = snapshot(result, (*objects, *(getattr(model, name) for name in names)))
    found |= {"draws": spmd.rng_state(), "generator": torch.get_rng_state()}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in found.items()}


MODES: dict[str, dict[str, Any]] = {
    "replicate": {"parallel_style": "replicate"},
    "fully_shard": {"parallel_style": "fully_shard"},
    "shard_optimizer": {"shard_optimizer": True},
    "micro-batches": {"micro_batches": 2},
    "sequence": {"axes": {"sequence": "x"}},
    "stages": {"axes": {"stages": "x"}, "micro_batches": 2, "stages": ["out"]},
}


def fails(rank: int, world: int, case: Cleared, mode: str, transport: str, at: int) -> list[str]:
    """Rank 1 has an id out of range in call ``at``; what that call changes, and what differs after two more."""
    splits = mode not in ("sequence", "stages")
    with communicating(rank, transport):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
        step = spmd.compile(case.step, parallel_mode=spmd.DataParallel(mesh=mesh, **MODES[mode]))
        torch.manual_seed(0)
        objects = case.build()
        own = rank if splits else 0
        for k in range(at):
            result = step(*objects, *case.part(own, k))
        before = everything(None, objects)
        ids, y = case.part(own, at)
        out_of_range = ids.clone()
        out_of_range[0, -1] = IDS  # where ranks split the sequence, it is on one of them
        with pytest.raises((IndexError, spmd.RankFailedError)):
            step(*objects, out_of_range if rank == 1 or not splits else ids, y)
        changed = all_unequal([before], [everything(None, objects)], rank, world, rtol=0, atol=0)
        for k in range(at, at + 2):
            result = step(*objects, *case.part(own, k))
    expected = plain_run(case, world if splits else 1, at + 2)[-1:]
    return changed + all_unequal(expected, [snapshot(result, objects)], rank, world)


@pytest.mark.parametrize("case, mode, transport", [
    (Rich(), "replicate", "shared memory"),
    (Rich(), "fully_shard", "messages"),
    (Cleared(), "shard_optimizer", "shared memory"),
    pytest.param(Rich(), "shard_optimizer", "shared memory", marks=pytest.mark.exhaustive),
    (Cleared(), "micro-batches", "messages"),
    (Cleared(), "sequence", "shared memory"),
    (Cleared(), "stages", "shared memory"),
])  # fmt: skip
def test_a_call_that_fails_while_it_runs_changes_nothing(
    ranks: Ranks, case: Cleared, mode: str, transport: str
) -> None:
    assert ranks.run(2, fails, case, mode, transport, 2) == [[], []]


def fails_at_the_end(rank: int, world: int) -> list[str]:
    """Rank 1 raises behind its last message; what that call changes, and what differs after it was made again."""
    case = LeavesGradients()
    step = spmd.compile(case.step, passes=faults.pipeline())
    torch.manual_seed(0)
    objects = case.build()
    step(*objects, *case.part(rank, 0))
    before = everything(None, objects)
    arm(Fault(faults.raises, 0.999) if rank == 1 else None)
    with pytest.raises((Injected, spmd.RankFailedError)):
        step(*objects, *case.part(rank, 1))
    arm(None)
    changed = all_unequal([before], [everything(None, objects)], rank, world, rtol=0, atol=0)
    result = step(*objects, *case.part(rank, 1))
    return changed + all_unequal(plain_run(case, world, 2)[-1:], [snapshot(result, objects)], rank, world)


def test_gradients_that_are_all_a_call_writes_are_those_of_all_ranks_or_of_none(ranks: Ranks) -> None:
    assert ranks.run(2, fails_at_the_end) == [[], []]
