"""What a user keeps of state that one stage of a pipeline has lives on that stage, too."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

import spmd
from tests.harness.pool import Ranks
from tests.spmd.python_state.test_kept_split import compared

pytestmark = pytest.mark.slow


def train(rank: int, world: int) -> tuple[int, bool]:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "pp"))
    axes = {"batch": "dp", "stages": "pp"}
    mode = spmd.DataParallel("fully_shard", mesh=mesh, axes=axes, micro_batches=2, stages=["self.model.2"])
    return compared(mode, rank, 1)


def test_copies_are_read_and_written_where_their_parameters_are(ranks: Ranks) -> None:
    assert [is_split for _, is_split in ranks.run(2, train)] == [True, True]
