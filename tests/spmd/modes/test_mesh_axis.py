"""Data parallel over one axis of a larger mesh: ranks along the other axis have the same data."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.device_mesh import init_device_mesh

import spmd
from tests.harness.cases import NARROW
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks


def run(rank: int, world: int, axis: str, style: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))[axis]
    case = replace(NARROW, optimizer="SGD momentum")
    coordinate = mesh.get_local_rank()
    _, got = compiled_run(coordinate, case, 5, parallel_mode=spmd.DataParallel(style, mesh=mesh))
    return all_unequal(plain_run(case, 2, 5), got, coordinate, 2)


@pytest.mark.parametrize("style, axis", [("replicate", "dp"), ("fully_shard", "other")])
def test_one_axis_of_a_larger_mesh(ranks: Ranks, style: str, axis: str) -> None:
    assert ranks.run(4, run, axis, style) == [[]] * 4
