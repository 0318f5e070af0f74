"""What a user asked for is had, or it is an error: dtypes of reductions and gathers, placements by pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import spmd
from passes import Role
from tests.harness.cases import mlp
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks

FP32, BF16 = torch.float32, torch.bfloat16
POLICY = spmd.MixedPrecisionPolicy(reduce_dtype=FP32)
MODES: dict[str, dict[str, Any]] = {
    "replicate": {"parallel_style": "replicate", "reduce_dtype": FP32},
    "replicate by policy": {"parallel_style": "replicate", "mp_policy": POLICY},
    "fully_shard": {"parallel_style": "fully_shard", "reduce_dtype": FP32},
    "fully_shard by policy": {"parallel_style": "fully_shard", "mp_policy": POLICY},
    "shard_optimizer": {"parallel_style": "replicate", "shard_optimizer": True, "reduce_dtype": FP32},
}


class Weight(nn.Module):
    """A weight of ones by which rows are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=BF16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def updated(rank: int, world: int) -> dict[str, list[float]]:
    found = {}
    for name, mode in MODES.items():
        model = Weight()
        compiled = spmd.compile(step, parallel_mode=spmd.DataParallel(**mode))
        compiled(
            model, torch.optim.SGD(model.parameters(), lr=1.0), torch.full((1, 3), (256.0, 1.0, 1.0)[rank]).bfloat16()
        )
        with spmd.unshard(model):
            found[name] = model.weight.float().tolist()
    return found


def test_gradients_are_summed_in_a_wider_dtype(ranks: Ranks) -> None:
    """In bfloat16, 256 + 1 is 256."""
    for found in ranks.run(3, updated):
        assert found == {name: [-258.0] * 3 for name in MODES}


@pytest.mark.parametrize("name", MODES)
def test_what_is_sent_has_the_dtype(name: str) -> None:
    model = mlp(4, 6, 2).bfloat16()
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1)
    mode = spmd.DataParallel(**MODES[name])
    compiled = compile_on_fake_ranks(2, step, objects, torch.randn(3, 4).bfloat16(), parallel_mode=mode)
    sent = [node for node in compiled.program.collectives() if node.meta["collective"].role is Role.GRADIENT]
    assert sent and all(node.meta["val"].dtype is FP32 for node in sent)


def test_to_gather_in_a_wider_dtype_is_an_error() -> None:
    model = mlp(4, 6, 2).bfloat16()
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1)
    mode = spmd.DataParallel("fully_shard", gather_dtype=FP32)
    with pytest.raises(spmd.PlacementError, match="gather_dtype to be narrower than the parameters"):
        compile_on_fake_ranks(2, step, objects, torch.randn(3, 4).bfloat16(), parallel_mode=mode)


@pytest.mark.parametrize("given", [Replicate(), [Replicate()], {"dp": Replicate()}], ids=["bare", "list", "axis"])
def test_a_placement_that_a_pattern_names_is_obeyed(given: Any) -> None:
    model = mlp(4, 6, 2)
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1)
    mode = spmd.DataParallel("fully_shard", params={"*.0.*": given})
    compile_on_fake_ranks(2, step, objects, torch.randn(3, 4, dtype=torch.float64), parallel_mode=mode)
    assert {name: isinstance(p, DTensor) for name, p in model.named_parameters()} == {
        "0.weight": False,
        "0.bias": False,
        "2.weight": True,
        "2.bias": True,
    }


def own_unit(rank: int, world: int) -> list[bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)).double()
    spmd.fully_shard(model[1])
    spmd.fully_shard(model)
    spmd.compile(step)(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4, dtype=torch.float64))
    with spmd.unshard(model, recurse=False):
        return [isinstance(p, DTensor) for p in model.parameters()]


def test_unshard_without_recursion_shows_the_unit(ranks: Ranks) -> None:
    assert ranks.run(2, own_unit)[0] == [False, False, True, True, False, False]
