"""Deferred updates among hosts whose mesh has an axis of another role than the batch: the plain step's numbers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import spmd
from tests.harness.cases import MLP
from tests.harness.experts import Form, Mixture, Training
from tests.harness.messages import messages
from tests.harness.oracle import all_unequal, snapshot
from tests.harness.pool import Ranks
from tests.interplay import training
from tests.interplay.array import plain_row
from tests.interplay.comparing import joined
from tests.spmd.modes import test_sequence

CALLS = 4


@dataclass(frozen=True)
class Axis:
    """A mesh with an axis of this role; along ``batch`` each rank has a part of the rows."""

    mesh: dict[str, int]
    options: dict[str, Any]
    batch: str = ""
    steps: Any = field(default_factory=lambda: MLP(sizes=(6, 8, 4), rows=4, optimizer="SGD momentum"))

    def build(self) -> tuple[Any, ...]:
        torch.manual_seed(0)
        return tuple(self.steps.build())

    def parts(self, call: int) -> list[Any]:
        """What the ranks along the batch axis pass."""
        return [self.steps.part(k, call) for k in range(self.mesh.get(self.batch, 1))]


class Mixtures(nn.Module):
    """Two layers of experts, so that gradients of the later one are in flight while the earlier one is computed."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.first, self.second = Mixture(form), Mixture(form)

    def forward(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        x, one = self.first(x, chosen)
        x, other = self.second(x, chosen)
        return x, one + other


@dataclass(frozen=True)
class OfExperts(Training):
    """Trains two layers of experts."""

    def build(self) -> tuple[Any, ...]:
        model = Mixtures(self.form).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class OfTokens:
    """A transformer whose sequences are split; all ranks pass them whole."""

    step = staticmethod(test_sequence.train)

    def build(self) -> tuple[Any, ...]:
        return test_sequence.arguments(8, 4, rows=2)[:2]

    def part(self, _: int, call: int) -> tuple[Any, ...]:
        return (torch.randint(13, (2, 8), generator=torch.Generator().manual_seed(call)),)


COLUMNS, ROWS = {"tp": Shard(0)}, {"tp": Shard(1)}
AXES = {
    "experts": Axis({"ep": 2}, {"axes": {"batch": "ep", "experts": "ep"}}, "ep", OfExperts("capacity")),
    "experts, split": Axis(
        {"ep": 2},
        {"parallel_style": "fully_shard", "axes": {"batch": "ep", "experts": "ep"}},
        "ep",
        OfExperts(),
    ),
    "gathered sequence": Axis({"cp": 2}, {"axes": {"sequence": "cp"}, "attention": "gather"}, "", OfTokens()),
    "ring": Axis(
        {"cp": 2}, {"axes": {"sequence": "cp"}, "attention": "ring", "parallel_style": "fully_shard"}, "", OfTokens()
    ),
    "tensor": Axis({"dp": 2, "tp": 2}, {"params": {"model.0.*": COLUMNS, "model.2.weight": ROWS}}, "dp"),
}


def trained(rank: int, world: int, name: str) -> tuple[list[str], bool]:
    """What differs from the plain step, and whether an update was pending."""
    axis = AXES[name]
    plain, objects = axis.build(), axis.build()
    losses = list[tuple[Any, Any]]()
    with messages(rank):
        mesh = init_device_mesh("cpu", tuple(axis.mesh.values()), mesh_dim_names=tuple(axis.mesh))
        mode = spmd.DataParallel(mesh=mesh, defer_updates=True, **axis.options)
        step = spmd.compile(axis.steps.step, parallel_mode=mode)
        own = mesh.get_local_rank(axis.batch) if axis.batch else 0
        for call in range(CALLS):
            parts = axis.parts(call)
            want = axis.steps.step(*plain, *(torch.cat(each) for each in zip(*parts, strict=True)))
            got = step(*objects, *copy.deepcopy(parts[own]))
            losses.append((want, got))
        pending = any(each.has_pending for each in step._dispatch.programs.deferred())
        step.flush()
        first = [tuple(each[0] if isinstance(each, tuple) else each for each in pair) for pair in losses]
        unequal = [f"loss {k}" for k, (want, got) in enumerate(first) if abs(float(want) - float(got)) > 1e-10]
        return unequal + all_unequal([snapshot(None, plain)], [snapshot(None, objects)], rank, world), pending


def marks(name: str) -> list[Any]:
    return [test_sequence.pytestmark] if isinstance(AXES[name].steps, OfTokens) else []


# The first has no parts of parameters on their way, and a ring sends more often than a gather.
REST = ("experts", "gathered sequence")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks(name) + [pytest.mark.exhaustive] * (name in REST)) for name in AXES],
)
def test_an_update_is_deferred_beside_an_axis_of_each_role(ranks: Ranks, name: str) -> None:
    world = torch.Size(AXES[name].mesh.values()).numel()
    assert ranks.run(world, trained, name) == [([], True)] * world


@test_sequence.pytestmark
def test_nothing_is_deferred_that_ranks_reduce_in_memory_that_they_share() -> None:
    """Beside a split sequence, in a model whose gradients are all reduced together, behind the loss."""
    row = plain_row(mesh="sequence")
    given = training.Training.of(row).arguments() + joined(row, 0)
    mode = spmd.DataParallel(axes={"sequence": "cp"}, defer_updates=True)
    step = spmd.compile(training.step_of(row), parallel_mode=mode)
    verdict = spmd.verify(step, *given, world=2, mesh={"cp": 2}, steps=2)
    assert verdict, verdict


def test_stages_take_micro_batches_which_defer_nothing() -> None:
    with pytest.raises(ValueError, match="expected no defer_updates=True with micro_batches"):
        spmd.DataParallel(axes={"stages": "pp"}, micro_batches=2, defer_updates=True)
