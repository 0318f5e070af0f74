"""An operand that a kernel reads in one layout has it: parts cut out of replicas are copied, and nothing else is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import spmd
from tests.harness.fake import fake_world
from tests.harness.oracle import Case, assert_agrees, random_generator
from tests.harness.pool import Ranks

aten = torch.ops.aten


def _step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The statistics of a norm, and matrices, are computed whole, and read in parts for gradients."""
    w = w.clone().requires_grad_()
    h = F.layer_norm(x * w, (3,))
    matrices = (x * w).view(2, 4, 3, 3)
    whole = h.sin().sum((0, 1)) + matrices.sin().sum((0, 1))
    part = spmd.constrain(h * x, {"tp": Shard(1)})
    volumes = spmd.constrain(torch.linalg.det(matrices) * x[:, ::3, 0], {"tp": Shard(1)})
    first = torch.autograd.grad(part.exp().sum(2).square().sum(), w, retain_graph=True)
    return (*first, *torch.autograd.grad(volumes.square().sum(), w), whole.detach())


def _inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 2, 12, 3, generator=generator, dtype=torch.float64)
    return x, w


def _compiled(world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    mode = spmd.DTensorExpand(mesh=mesh, inputs={"x": Replicate(), "w": Replicate()})
    return spmd.compile(parallel_mode=mode)(_step)


def _largest_difference(rank: int, world: int) -> float:
    found, expected = _compiled(world)(*_inputs()), _step(*_inputs())
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def test_gradients_of_parts_of_whole_values_are_right(ranks: Ranks) -> None:
    assert max(ranks.run(2, _largest_difference)) < 1e-12


def test_parts_of_statistics_are_copied() -> None:
    with fake_world(2):
        compiled = _compiled(2)
        compiled(*_inputs())
    nodes = compiled.program.graph.find_nodes
    (norm,) = nodes(op="call_function", target=aten.native_layer_norm_backward.default)
    assert all(operand.meta["val"].is_contiguous() for operand in norm.args[3:5])


class ChannelsLast(Case):
    """Convolutions and norms of which weights and images lie with their channels last, and gradients do not."""

    def build(self) -> tuple[Any, ...]:
        layers = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(4, 4)
        model = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def part(self, rank: int, step: int) -> tuple[Any, ...]:
        x = torch.randn(2 + step % 2, 3, 7, 7, generator=random_generator(rank, step), dtype=torch.float64)
        return (x.to(memory_format=torch.channels_last),)

    @staticmethod
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        loss: Tensor = (model(x) ** 3).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.parametrize("mode", [
    "fully_shard",
    pytest.param({"parallel_style": "replicate", "shard_optimizer": True}, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_a_norm_reads_its_operands_in_one_layout(ranks: Ranks, mode: Any) -> None:
    assert_agrees(ranks, 2, ChannelsLast(), mode, steps=4)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.usefixtures("alone")
def test_a_convolution_in_single_precision_is_traced_as_it_lies(kernel: int) -> None:
    """With oneDNN, which takes no fp64, its result has the channels last; a norm's backward trusted the trace."""
    layers = nn.Conv2d(4, 4, kernel), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, kernel), nn.GroupNorm(2, 4)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    models = model, copy.deepcopy(model)
    x = torch.randn(16, 4, 7, 7).to(memory_format=torch.channels_last)
    for each, step in zip(models, (spmd.compile(ChannelsLast.step), ChannelsLast.step), strict=True):
        step(each, torch.optim.SGD(each.parameters(), lr=0.1), x)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
