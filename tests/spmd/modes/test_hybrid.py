"""A mesh ("replicate", "shard"): the batch is split over both axes, parameters over the second."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import spmd
from passes import Kind, Role
from tests.harness.cases import MLP, NARROW
from tests.harness.fake import fake_world
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks

EVEN = MLP(sizes=(8, 16, 8), rows=4)


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def differences(rank: int, world: int, case: MLP, style: str, shard_optimizer: bool) -> list[str]:
    mode = spmd.DataParallel(style, mesh=hybrid(), shard_optimizer=shard_optimizer)  # type: ignore[arg-type]
    _, got = compiled_run(rank, case, 5, parallel_mode=mode)
    return all_unequal(plain_run(case, world, 5), got, rank, world)


@pytest.mark.parametrize("case, style, shard_optimizer", [
    pytest.param(replace(EVEN, optimizer="SGD"), "fully_shard", False, marks=pytest.mark.exhaustive),
    (replace(NARROW, optimizer="SGD momentum"), "fully_shard", False),
    (replace(NARROW, optimizer="SGD momentum"), "replicate", True),
], ids=["even", "uneven", "optimizer"])  # fmt: skip
def test_numbers_are_those_of_the_plain_step(ranks: Ranks, case: MLP, style: str, shard_optimizer: bool) -> None:
    assert ranks.run(4, differences, case, style, shard_optimizer) == [[]] * 4


def test_parts_of_gradients_are_reduced_over_the_other_axis() -> None:
    with fake_world(4):
        model, optimizer = EVEN.build()
        mode = spmd.DataParallel("fully_shard", mesh=hybrid())
        step = spmd.compile(EVEN.step, parallel_mode=mode)
        step(model, optimizer, *EVEN.part(0, 0))
        parameters = list(model.parameters())
        assert all(isinstance(p, DTensor) and p.placements == (Replicate(), Shard(0)) for p in parameters)
    size = sum(p.numel() * 8 for p in parameters)
    found = [(t.kind, t.axis, t.bytes) for t in step.report().traffic if t.role == Role.GRADIENT]
    assert sorted(found) == [(Kind.ALL_REDUCE, "replicate", size // 2), (Kind.REDUCE_SCATTER, "shard", size)]


def test_a_placement_named_over_the_axis_of_the_style_is_kept() -> None:
    with fake_world(2):
        model, optimizer = EVEN.build()
        mode = spmd.DataParallel("fully_shard", params={"*.0.*": {"dp": Replicate()}})
        spmd.compile(EVEN.step, parallel_mode=mode)(model, optimizer, *EVEN.part(0, 0))
        split = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    assert split == ["2.weight", "2.bias"]
    assert isinstance(model[0].weight, torch.Tensor)
