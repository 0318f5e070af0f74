"""A dim that two mesh axes split, unevenly: parts differ in more ways than along one axis, and all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import spmd
from passes import Axis, BucketAllReduce, FormUnits, Mesh, Pass
from spmd.placements import all_shapes, local_shape, smallest_shape
from tests.harness.fake import fake_world

pytestmark = pytest.mark.slow

F64 = torch.float64


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (4, 3)])
def test_all_shapes_and_the_smallest_are_those_of_the_parts(sizes: tuple[int, int]) -> None:
    """The smallest part is not always the last rank's: 7 rows over (2, 3) are 2, 2 and 0, then 1, 1 and 1."""

    def seen_from(rank: tuple[int, ...]) -> Mesh:
        return Mesh(tuple(Axis(name, size, "", n) for name, size, n in zip("ab", sizes, rank, strict=True)))

    placement = (Shard(0), Shard(0))
    for rows in range(30):
        parts = {local_shape((rows, 3), placement, seen_from(rank)) for rank in product(*map(range, sizes))}
        assert set(all_shapes((rows, 3), placement, seen_from((0, 0)).axes)) == parts
        assert smallest_shape((rows, 3), placement, seen_from((0, 0))) == min(parts)


def split(x: Tensor) -> Tensor:
    return spmd.constrain(x, {"a": Shard(0), "b": Shard(0)})


STEPS: dict[str, tuple[int, tuple[int, int], Any]] = {
    "one row left of several": (10, (3, 2), lambda x: split(x).squeeze(0)),
    "none left on a rank before the last": (7, (2, 3), lambda x: split(x).amax(0)),
}


@pytest.mark.parametrize("name", STEPS)
def test_all_ranks_emit_the_same_nodes(name: str) -> None:
    rows, sizes, function = STEPS[name]

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = function(model(x)).square().sum()
        loss.backward()
        return loss

    def emitted(rank: int) -> list[str]:
        with fake_world(6, rank):
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
            mode = spmd.DTensorExpand(mesh=mesh, inputs={"x": {}})
            compiled = spmd.compile(parallel_mode=mode, passes=())(step)
            compiled(nn.Linear(4, 4).to(F64), torch.randn(rows, 4, dtype=F64))
        assert compiled.program is not None
        return [str(node.target) for node in compiled.program.graph.nodes]

    assert emitted(0) == emitted(2) == emitted(5)


def test_a_view_of_a_value_gathered_unevenly() -> None:
    """The gathered value is a slice of a padded one, so it cannot be viewed as the global one could."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        hidden = spmd.constrain(model(x), {"a": Shard(0), "b": Shard(2)})
        loss = hidden.permute(2, 1, 0).sin().reshape(4, 18).square().sum()
        loss.backward()
        return loss

    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        mode = spmd.DTensorExpand(mesh=mesh, inputs={"x": {}})
        spmd.compile(parallel_mode=mode, passes=())(step)(nn.Linear(4, 4).to(F64), torch.randn(3, 6, 4, dtype=F64))


def columns(model: nn.ModuleList, x: Tensor) -> Tensor:
    loss: Tensor = sum(layer(x).square().sum() for layer in model)  # type: ignore[assignment]
    loss.backward()
    return loss


def reduced(rank: int, passes: Sequence[Pass]) -> tuple[list[int], list[tuple[str, ...]]]:
    """Bytes of this rank's part of each weight; and which gradients go together over the rows' axis."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 7, bias=False) for _ in range(6)).to(F64)
    with fake_world(4, rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mode = spmd.DTensorExpand(mesh=mesh, inputs={"x": {"dp": Shard(0)}}, params={"*": {"tp": Shard(0)}})
        compiled = spmd.compile(parallel_mode=mode, passes=passes)(columns)
        compiled(model, torch.randn(2, 4, dtype=F64))
        weights = [parameter.to_local().nbytes for parameter in model.parameters()]  # type: ignore[operator]
    collectives = [node.meta["collective"] for node in compiled.program.collectives()]
    return weights, [each.of for each in collectives if each.axis == "dp" and each.of]


@pytest.mark.parametrize("passes, together", [
    ((BucketAllReduce(max_bytes=200, first_bytes=200),), [2, 2, 2]),
    ((FormUnits(max_bytes=200, first_bytes=200), BucketAllReduce()), [2, 2, 2]),
    ((BucketAllReduce(max_bytes=200, first_bytes=0), BucketAllReduce(max_bytes=250)), [3, 2, 1]),
], ids=["buckets", "units", "buckets of buckets"])  # fmt: skip
def test_ranks_with_less_of_a_dim_make_the_same_buckets(passes: Sequence[Pass], together: list[int]) -> None:
    """Of two weights, one rank has 256 bytes, which fill a bucket, the next one 192, which do not."""
    (most, first), (least, second), last = [reduced(rank, passes) for rank in (0, 1, 3)]
    assert (most, least) == ([128] * 6, [96] * 6)
    assert first == second == last[1]
    assert list(map(len, first)) == together
