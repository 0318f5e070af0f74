"""Steps that are used over two meshes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import spmd
from tests.harness.fake import fake_world
from tests.harness.pool import Ranks


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_ranks_that_do_not_meet_do_not_share_an_arena() -> None:
    """A model over both axes, then one over the first alone: its ranks do not wait for those of the second axis."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step = spmd.compile(parallel_mode=spmd.DataParallel("replicate", mesh=mesh["dp"]))(train)
        split, plain = nn.Linear(4, 6), nn.Linear(4, 6)
        split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh["tp"], [Shard(0)]))
        arenas = []
        for model in (split, plain, split):
            step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2, 4))
            arenas.append(step._dispatch.programs.last.executable.function.arenas)
    assert arenas[0] is not arenas[1] and arenas[0] is arenas[2]


def over_two_meshes_of_one_shape(rank: int, world: int) -> list[float]:
    losses = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = spmd.compile(parallel_mode=spmd.DataParallel("replicate", mesh=mesh["dp"]))(train)
        losses += [float(step(model, optimizer, torch.ones(2, 4) + rank)) for _ in range(2)]
    return losses


def test_two_meshes_of_the_same_ranks_connect_one_after_the_other(ranks: Ranks) -> None:
    for losses in ranks.run(2, over_two_meshes_of_one_shape):
        assert losses[:2] == losses[2:] and losses[0] != losses[1]
