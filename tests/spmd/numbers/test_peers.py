"""For mean losses over equal counts, DDP and FSDP2 compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import spmd
from tests.harness.cases import MLP, make_optimizer, mlp
from tests.harness.pool import Ranks


def build(wrap: Any, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrap(mlp(15, 17, 4).float())
    return model, make_optimizer(optimizer, model.parameters())


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


PEERS = {"replicate": ddp, "fully_shard": fsdp}


def run(rank: int, world: int, style: str, optimizer: str) -> None:
    """Five steps of each; DDP and FSDP2 return a rank's own loss, so their losses are averaged."""
    case = MLP(sizes=(15, 17, 4), rows=6)
    theirs = build(PEERS[style], optimizer)
    ours = build(lambda model: model, optimizer)
    step = spmd.compile(parallel_mode=spmd.DataParallel(style))(MLP.step)
    for k in range(5):
        batch = [tensor.float() for tensor in case.part(rank, k)]
        expected = MLP.step(*theirs, *batch).detach()
        torch.distributed.all_reduce(expected)
        torch.testing.assert_close(step(*ours, *batch).detach(), expected / world)
        for mine, peer in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
            torch.testing.assert_close(whole(mine), whole(peer))


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


@pytest.mark.parametrize("world, optimizer", [(2, "SGD"), (4, "SGD momentum"), (2, "AdamW")])
@pytest.mark.parametrize("style", PEERS)
@pytest.mark.in_turn("style")
def test_the_same_as_ddp_and_fsdp2(ranks: Ranks, world: int, style: str, optimizer: str) -> None:
    ranks.run(world, run, style, optimizer)
