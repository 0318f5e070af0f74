"""What several ranks hold of state is equal to the bit on all, in each style and with each dtype on the wire."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import spmd
from tests.harness.messages import messages
from tests.harness.pool import Ranks

BF16, FP16 = torch.bfloat16, torch.float16
SPLIT = {"parallel_style": "fully_shard"}
IN_PARTS = {"shard_optimizer": True}


class Net(nn.Module):
    """Buffers by reductions of several kinds: running statistics, a maximum, a mean of weights, a count of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        for name in ("largest", "rows", "mean"):
            self.register_buffer(name, torch.zeros(()))
        self.by_hand = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax()))
        self.rows += len(x)
        return self.down(torch.tanh(self.norm(self.up(x)) * self.by_hand))


def train(model: Net, average: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    with torch.no_grad():
        model.by_hand -= 0.01 * model.by_hand.grad
        model.mean.copy_(model.up.weight.mean())
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
    optimizer.zero_grad()
    model.by_hand.grad = None
    return loss


def batch(rank: int, k: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * k + rank)
    return torch.randn(4, 7, generator=draw), torch.randn(4, 3, generator=draw)


def held(rank: int, world: int, by_messages: bool, options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """This rank's state, by its name and by the part that the rank has of it."""
    torch.manual_seed(0)
    model, average = Net(), Net()
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "by_hand"], lr=0.05)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")) if world > 2 else None
    with messages(rank) if by_messages else nullcontext():
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(mesh=mesh, **options))
        for k in range(4):
            step(model, average, optimizer, *batch(rank, k))
    state = {**model.state_dict(), **{f"average.{name}": each for name, each in average.state_dict().items()}}
    state |= {f"{k}.{name}": each for k, s in enumerate(optimizer.state.values()) for name, each in s.items()}
    return {name: part(each) for name, each in (state | exact(model)).items()}


def exact(model: nn.Module) -> dict[str, Tensor]:
    return {f"exact.{name}": each for name, each in spmd.state_dict(model).items()}


def part(value: Tensor) -> dict[str, Tensor]:
    if not isinstance(value, DTensor):
        return {"": value.detach()}
    places = zip(value.placements, value.device_mesh.get_coordinate(), strict=True)
    return {str([at for placement, at in places if placement.is_shard()]): value.to_local().detach()}


@pytest.mark.parametrize("world, by_messages, options", [
    pytest.param(2, True, {"reduce_dtype": BF16}, marks=pytest.mark.exhaustive),
    pytest.param(2, False, IN_PARTS | {"gather_dtype": BF16}, marks=pytest.mark.exhaustive),
    (2, True, IN_PARTS | {"gather_dtype": FP16, "reduce_dtype": BF16}),
    (2, False, IN_PARTS | {"gather_dtype": BF16, "mp_policy": spmd.MixedPrecisionPolicy(BF16, torch.float32)}),
    pytest.param(4, False, IN_PARTS | {"gather_dtype": BF16, "reduce_dtype": BF16}, marks=pytest.mark.exhaustive),
    (4, True, SPLIT | {"gather_dtype": BF16, "reduce_dtype": FP16}),
], ids=str)  # fmt: skip
def test_replicas_are_equal_to_the_bit(ranks: Ranks, world: int, by_messages: bool, options: dict[str, Any]) -> None:
    """On four ranks, groups of two split parameters, and two such groups hold the same."""
    seen: dict[tuple[str, str], Tensor] = {}
    found = ranks.run(world, held, by_messages, options)
    wrong = {
        name
        for of_rank in found
        for name, parts in of_rank.items()
        for place, values in parts.items()
        if not torch.equal(seen.setdefault((name, place), values), values)
    }
    assert not wrong and len(found[0]) > 30
