"""What a user keeps of split state between calls (means, importances, a teacher, gradients) is split state, too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import spmd
from tests.harness.fake import fake_world
from tests.harness.oracle import random_generator
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow

TENSOR_PARALLEL = {"self.model.0.weight": Shard(0), "self.model.2.weight": Shard(1)}
MODES: dict[str, Any] = {
    "fully_shard": spmd.DataParallel("fully_shard"),
    "micro-batches": spmd.DataParallel("fully_shard", micro_batches=2),
    "shard_optimizer": spmd.DataParallel("replicate", shard_optimizer=True),
    "tensor parallel": spmd.DTensorExpand(params=TENSOR_PARALLEL, inputs={"x": {}}),
}


class Trainer:
    """Keeps copies in dicts by name, in a list, an object, a closure and a class; two of them the step writes."""

    of_class: dict[str, Tensor]

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False)
        self.model = nn.Sequential(*layers).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.means: dict[str, Tensor] = {}
        self.weights: dict[str, Any] = {}
        self.start: list[list[Tensor]] = []
        self.task = SimpleNamespace(old=None)
        self.average: list[Tensor] = []
        self.teacher: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        closed = self.closed = list[Tensor]()
        self.penalty = lambda: sum((p - q).square().sum() for p, q in zip(self.model.parameters(), closed, strict=True))
        type(self).of_class = {}

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [*self.model.named_parameters()]

    def keep(self) -> None:
        for name, p in self.named:
            self.means[name] = p.detach().clone()
            self.weights[name] = self.weights.get(name, 0) + self.optimizer.state[p]["exp_avg_sq"].detach().clone()
        self.start = self.start or [[p, p.data.clone()] for p in self.model.parameters()]
        self.task.old = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.average = self.average or [p.detach().clone() for p in self.model.parameters()]
        self.teacher = self.teacher or {name: p.detach().clone() for name, p in self.named}
        self.closed[:] = [p.detach() * 0.9 for p in self.model.parameters()]
        type(self).of_class = {name: torch.zeros_like(p) + 0.1 for name, p in self.named}
        self.gradients = {name: g.detach().clone() for name, p in self.named if (g := p.grad) is not None}

    def kept(self) -> Tensor:
        """The terms of all that is kept, some of it read without parameters."""
        terms: list[Any] = [(self.weights[n] * (p - self.means[n]).square()).sum() * 300 for n, p in self.named]
        terms += [(p - q).norm() * 0.01 for p, q in self.start]
        terms += [(p - self.task.old[n]).abs().sum() * 0.01 for n, p in self.named]
        terms += [(p - t).square().sum() * 0.1 for p, t in zip(self.model.parameters(), self.average, strict=True)]
        terms += [self.penalty() * 0.02, *((p * self.of_class[n]).sum() for n, p in self.named)]
        terms += [0.1 * each.square().sum() for each in self.teacher.values()]
        return sum(terms)  # type: ignore[return-value]

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum(1).mean()
        if self.means:
            loss = loss + self.kept()
        loss.backward()
        if self.gradients:
            for n, p in self.named:
                assert p.grad is not None
                p.grad.sub_(self.gradients[n], alpha=0.1)
        self.optimizer.step()
        if self.means:
            with torch.no_grad():
                for p, average in zip(self.model.parameters(), self.average, strict=True):
                    average.mul_(0.9).add_(p, alpha=0.1)
                self.teacher = {n: 0.9 * self.teacher[n] + 0.1 * p.detach() for n, p in self.named}
        return loss.detach()

    def state(self) -> list[Tensor]:
        found = [*self.model.parameters(), *self.average, *self.teacher.values(), *self.weights.values()]
        return [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in found]


def train(rank: int, world: int, mode: str) -> tuple[int, bool]:
    return compared(MODES[mode], rank, 1 if mode == "tensor parallel" else world)


def compared(mode: spmd.ParallelMode, rank: int, count: int) -> tuple[int, bool]:
    """Compare with the plain step, on other rows for each of ``count`` ranks.

    Values are kept before the second and the fourth call. Returns the number of programs, and whether copies are split.
    """
    ours, plain = type("Compiled", (Trainer,), {})(), Trainer()
    step = spmd.compile(ours.step, parallel_mode=mode)
    for k in range(4):
        parts = [torch.randn(4, 6, generator=random_generator(r, k), dtype=torch.float64) for r in range(count)]
        got, want = step(parts[rank % count]), plain.step(torch.cat(parts))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        if k in (0, 2):
            ours.keep()
            plain.keep()
    torch.testing.assert_close(ours.state(), plain.state(), rtol=1e-11, atol=1e-12)
    return len(step.programs), isinstance(ours.teacher["0.weight"], DTensor)


@pytest.mark.parametrize(
    "mode",
    # Micro-batches in every run beside stages: tests/spmd/stages/test_kept.py.
    [pytest.param(mode, marks=[pytest.mark.exhaustive] * (mode == "micro-batches")) for mode in MODES],
)
def test_what_is_kept_is_read_and_written_as_by_the_plain_step(ranks: Ranks, mode: str) -> None:
    found = ranks.run(2, train, mode)
    assert [split for _, split in found] == [mode != "shard_optimizer"] * 2, "split as the parameters are"
    assert all(programs <= 3 for programs, _ in found), "tensors that are kept anew need no other program"


def refused(keep: Any) -> str:
    trainer = Trainer()
    kept: list[Any] = []

    def step(x: Tensor) -> Tensor:
        loss = trainer.model(x).square().sum()
        for p, q in kept:
            loss = loss + (p * q).sum()
        loss.backward()
        return loss.detach()

    with fake_world(2):
        compiled = spmd.compile(step, parallel_mode="fully_shard")
        compiled(torch.ones(2, 6, dtype=torch.float64))
        kept += [keep(p) for p in trainer.model.parameters()]
        with pytest.raises(spmd.CaptureError) as caught:
            compiled(torch.ones(2, 6, dtype=torch.float64))
    return str(caught.value)


def test_what_cannot_be_an_input_is_refused_by_its_name() -> None:
    message = refused(lambda p: (p, p.detach().clone()))
    assert "through the closure variable kept" in message and "from a tuple or a set" in message
    message = refused(lambda p: [p.clone(), p.detach()])
    assert "in the closure variable kept" in message and "has a graph" in message
