"""Parameters that are DTensors before the first call: they stay where they are, on the step's mesh or a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import spmd
from passes import CaptureError, OneStorage, PlacementError, default
from tests.harness.cases import make_optimizer
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, plain_run, snapshot
from tests.harness.pool import Ranks
from tests.harness.structure import regression
from tests.spmd.modes.test_dtensor_expand import EVEN, UNEVEN, Blocks

MEGATRON = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


def distribute(model: nn.Module, mesh: DeviceMesh, placements: dict[str, Any]) -> None:
    """Make DTensors of the parameters whose names end so."""
    for name, parameter in list(model.named_parameters()):
        for ending, placement in placements.items():
            if name.endswith(ending):
                owner, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                placed = placement if isinstance(placement, list) else [placement]
                setattr(owner, key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placed)))


def run(rank: int, world: int, case: Blocks, on: str, mode: str, placements: dict[str, Any]) -> list[str]:
    """Compare with one device. ``on``: the axes of the DTensors' mesh; ``mode``: a style, and the axes of its mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    style, _, axes = mode.partition(" on ")
    torch.manual_seed(0)
    model, _ = case.build()
    distribute(model, mesh if on == "both" else mesh[on], placements)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    parallel_mode = spmd.DataParallel(style, mesh=mesh if axes == "both" else mesh[axes])
    step = spmd.compile(parallel_mode=parallel_mode)(case.step)
    got = []
    for k in range(3):
        result = step(model, optimizer, *case.part(rank // 2, k))
        got.append(snapshot(result, (model, optimizer)))
    return all_unequal(plain_run(case, 2, 3), got, rank // 2, 2)


@pytest.mark.parametrize("case, on, mode, placements", [
    pytest.param(EVEN, "tp", "replicate on dp", MEGATRON, marks=pytest.mark.exhaustive),
    (UNEVEN, "tp", "fully_shard on dp", MEGATRON),
    (UNEVEN, "tp", "replicate on both", MEGATRON),
    (UNEVEN, "both", "fully_shard on both", {"weight": [Replicate(), Shard(1)], "bias": [Shard(0), Shard(0)]}),
], ids=["on tp", "uneven", "mode on both", "both axes"])  # fmt: skip
def test_numbers(ranks: Ranks, case: Blocks, on: str, mode: str, placements: dict[str, Any]) -> None:
    assert ranks.run(4, run, replace(case, optimizer="SGD momentum"), on, mode, placements) == [[]] * 4


def test_they_keep_their_placements_and_are_on_the_steps_mesh_from_the_first_call() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, _ = EVEN.build()
        distribute(model, mesh["tp"], MEGATRON)
        before = {name: p.to_local().data_ptr() for name, p in model.named_parameters() if isinstance(p, DTensor)}
        optimizer = torch.optim.AdamW(model.parameters())
        passes = [each for each in default() if not isinstance(each, OneStorage)]  # which would move them
        step = spmd.compile(parallel_mode=spmd.DataParallel("replicate", mesh=mesh["dp"]), passes=passes)(EVEN.step)
        for k in range(3):
            step(model, optimizer, *EVEN.part(0, k))
        assert len(step.programs) == 1
        assert len(before) == 3
        for name, address in before.items():
            parameter: Any = dict(model.named_parameters())[name]
            assert parameter.device_mesh == mesh and parameter.placements[0] == Replicate()
            assert parameter.to_local().data_ptr() == address
            assert optimizer.state[parameter]["exp_avg"].placements == parameter.placements


def test_a_mesh_of_its_own_is_refused() -> None:
    with fake_world(4):
        model, _, x, y = regression(4, 4)
        distribute(model, init_device_mesh("cpu", (4,), mesh_dim_names=("other",)), {"weight": Shard(0)})
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step = spmd.compile(parallel_mode=spmd.DataParallel(mesh=mesh))(EVEN.step)
        with pytest.raises(
            PlacementError, match=r"some parameters are DTensors on .*other.*give the mode the same mesh"
        ):
            step(model, torch.optim.SGD(model.parameters()), x, y)


@pytest.mark.parametrize("style", [
    ColwiseParallel(),
    RowwiseParallel(),
    SequenceParallel(),
    PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
], ids=lambda style: type(style).__name__)  # fmt: skip
def test_torchs_styles_are_refused_with_the_way_out(style: Any) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model, _, x, y = regression(4, 4)
        part = nn.Sequential(nn.LayerNorm(4), model).double()
        parallelize_module(part, mesh, {"0" if isinstance(style, SequenceParallel) else "1.0": style})
        step = spmd.compile(parallel_mode=spmd.DataParallel(mesh=mesh))(EVEN.step)
        with pytest.raises(CaptureError, match=r"made parallel by torch's parallelize_module.*DataParallel\(mesh=mesh"):
            step(part, torch.optim.SGD(part.parameters()), x, y)
