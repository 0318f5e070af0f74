"""``spmd.show``: the picture of a tensor on its mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import spmd
from spmd.mesh_picture import _part
from tests.harness.fake import fake_world


def shown(capsys: pytest.CaptureFixture[str], tensor: torch.Tensor) -> list[str]:
    spmd.show(tensor)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def placed(mesh: Any, shape: tuple[int, ...], *placements: Any) -> DTensor:
    return distribute_tensor(torch.zeros(shape), mesh, list(placements))


def test_a_mesh_of_two_axes_is_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert shown(capsys, placed(mesh, (5, 6), Shard(0), Shard(1))) == [
            "f32[5, 6], split along dim 0 over dp, split along dim 1 over tp",
            "      tp 0                tp 1",
            "dp 0  rank 0  [0:3, 0:3]  rank 1  [0:3, 3:6]",
            "dp 1  rank 2  [3:5, 0:3]  rank 3  [3:5, 3:6]",
        ]
        pending = DTensor.from_local(torch.zeros(3, 6), mesh, [Partial(), Shard(0)], run_check=False)
        assert shown(capsys, pending)[0] == "f32[6, 6], pending sum over dp, split along dim 0 over tp"
        assert shown(capsys, placed(mesh, (), Replicate(), Replicate()))[-1] == "dp 1  rank 2  all  rank 3  all"


def test_a_mesh_of_one_axis_has_no_heading_and_ranks_may_hold_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_world(3):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
        assert shown(capsys, placed(mesh, (2, 6), Shard(0))) == [
            "f32[2, 6], split along dim 0 over dp",
            "dp 0  rank 0  [0:1, :]",
            "dp 1  rank 1  [1:2, :]",
            "dp 2  rank 2  nothing",
        ]
    assert shown(capsys, torch.zeros(3)) == ["f32[3], a plain tensor: whole on every rank"]


def test_of_a_large_mesh_each_part_names_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        lines = shown(capsys, placed(mesh, (4, 6), Shard(0), Replicate(), Shard(1)))
    assert [line.split(maxsplit=2) for line in lines[1:]] == [
        ["part", "ranks"],
        *(["[0:2,", "0:3]", "0, 2"], ["[0:2,", "3:6]", "1, 3"]),
        *(["[2:4,", "0:3]", "4, 6"], ["[2:4,", "3:6]", "5, 7"]),
    ]


@pytest.mark.parametrize("placements", [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))])
@pytest.mark.parametrize("rank", range(6))
def test_the_parts_are_those_that_ranks_hold(rank: int, placements: Any) -> None:
    """Slices of the global tensor, held against what ``distribute_tensor`` gives each rank; uneven."""
    whole = torch.arange(35).view(7, 5)
    with fake_world(6, rank):
        mesh = init_device_mesh("cpu", (2, 3))
        tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        part = _part(tensor, tuple(mesh.get_coordinate() or ()))
        if part == "nothing":
            assert tensor.to_local().numel() == 0
            return
        spans = [dim.split(":") for dim in part[1:-1].split(", ")]
        slices = tuple(slice(*(int(end) if end else None for end in span)) for span in spans)
        assert torch.equal(whole[slices], tensor.to_local())


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected spmd\.show to be given a tensor, got list"):
        spmd.show([])  # type: ignore[arg-type]
