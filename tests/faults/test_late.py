"""Nothing of a call depends on when a message leaves or arrives, nor does a copy of the model between two calls."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import spmd
from passes.ir.collectives import WAIT as wait
from passes.runtime.message_collectives import recv, send
from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.messages import messages
from tests.harness.oracle import all_unequal, random_generator, snapshot
from tests.harness.pool import Ranks

from .late import late_messages

CALLS = 6
STAGES: dict[str, Any] = {"axes": {"stages": "pp", "batch": "dp"}, "micro_batches": 2, "parallel_style": "fully_shard"}


@dataclass(frozen=True)
class Accumulates(MLP):
    """Gradients of two calls, clipped by hand; a mean over some rows; the third batch is short."""

    sizes: tuple[int, ...] = (5, 7, 6, 3)
    rows: int = 8
    optimizer: str = "SGD momentum"

    def build(self) -> tuple[Any, ...]:
        model = mlp(*self.sizes)
        if self.optimizer == "Adafactor":
            return model, torch.optim.Adafactor(model.parameters(), lr=0.1)
        return model, make_optimizer(self.optimizer, model.parameters())

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        draw, rows = random_generator(rank, step), self.rows - 2 * (step == 2)
        x, y = (torch.randn(rows, size, generator=draw, dtype=torch.float64) for size in (5, 3))
        return x, y, (torch.rand(rows, generator=draw) < 0.7).double()

    @staticmethod
    def step(  # type: ignore[override]
        model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, keep: Tensor, is_last: bool
    ) -> Tensor:
        loss = ((model(x) - y).square().mean(1) * keep).sum() / keep.sum()
        loss.backward()
        if is_last:
            norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
            for p in model.parameters():
                p.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
            optimizer.step()
            optimizer.zero_grad()
        return loss


@dataclass(frozen=True)
class Clears(Accumulates):
    """Each call updates."""

    @staticmethod
    def step(  # type: ignore[override]
        model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, keep: Tensor, is_last: bool
    ) -> Tensor:
        return Accumulates.step(model, optimizer, x, y, keep, True)


def trained(rank: int, world: int, case: Accumulates, sizes: dict[str, int], mode: dict[str, Any]) -> Any:
    """What differs from the plain step after each call, with a copy of the model; and what was handed on too early.

    The last rank is slow at each send and receive, and before each copy.
    """
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    own, parts = mesh["dp"].get_local_rank(), sizes["dp"]
    torch.manual_seed(0)
    plain, objects = case.build(), case.build()
    objects[0].load_state_dict(plain[0].state_dict())
    expected, seen, left = [], [], 0
    pause = 0.001 * (rank == world - 1)
    with messages(rank), late_messages(pause) as late:
        step = spmd.compile(case.step, parallel_mode=spmd.DataParallel(mesh=mesh, **mode))
        for k in range(CALLS):
            given = [case.part(part, k) for part in range(parts)]
            want = case.step(*plain, *case.whole(given), k % 2 == 1)
            got = step(*objects, *given[own], k % 2 == 1)
            time.sleep(10 * pause)
            copied = copy.deepcopy(objects[0])
            left += len(late.in_flight)
            expected.append(snapshot(want, (*plain, copy.deepcopy(plain[0]))))
            seen.append(snapshot(got, (*objects, copied)))
        return all_unequal(expected, seen, own, parts), late.broken, left, late.count > 0


@pytest.mark.parametrize(
    "case, sizes, mode",
    [
        (Accumulates(), {"pp": 2, "dp": 1}, STAGES),  # collectives of a stage's ranks: as those of ranks without stages
        pytest.param(Accumulates(), {"pp": 2, "dp": 2}, STAGES, marks=pytest.mark.exhaustive),
        pytest.param(Clears(), {"dp": 2}, {"defer_updates": True}, marks=pytest.mark.exhaustive),
        (Clears(), {"dp": 2}, {"defer_updates": True, "parallel_style": "fully_shard"}),
        pytest.param(  # as the stages have them
            Accumulates(optimizer="Adafactor"),
            {"dp": 2},
            {"parallel_style": "fully_shard", "micro_batches": 2},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_no_number_depends_on_when_messages_arrive(ranks: Ranks, case: Any, sizes: Any, mode: dict[str, Any]) -> None:
    world = torch.Size(sizes.values()).numel()
    assert ranks.run(world, trained, case, sizes, mode) == [([], [], 0, True)] * world


def written_too_early(rank: int, world: int) -> list[str]:
    """What is found where the sender writes to what it sends, and the receiver to where it arrives."""
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with late_messages() as late:
        if rank == 0:
            x = torch.ones(3)
            message = send.default(x, 1, "a channel", group)
            x.zero_()
        else:
            message = recv.default([3], torch.float32, torch.device("cpu"), 0, "a channel", group)
            assert message.isnan().all()
            message.zero_()
        wait(message)
        assert rank == 0 or message.eq(1).all()
        return late.broken


def test_what_is_written_too_early_is_found(ranks: Ranks) -> None:
    sent, received = ranks.run(2, written_too_early)
    assert sent == ["what a send sends was written to before it had left"]
    assert received == ["what a recv writes to was written to before it had arrived"]
