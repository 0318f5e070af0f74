"""One table of costs decides, in one compile, what is communicated and by which ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import passes
import spmd
from passes import Axis, Kind, Phase, Program, Realise, Table
from passes.analysis.collective_algorithms import ALGORITHMS, BUILT_IN, Algorithm, Link, Point
from passes.default_passes import table_of, with_rates
from passes.ir.rates import UNMEASURED
from tests.harness.fake import fake_world

SIZES = (1, 1 << 24)


def link(axis: str, latency: float, per_byte: float, best: Algorithm = Algorithm.NATIVE) -> Link:
    """Every kind along ``axis``: the native algorithm at these costs, ``best`` at a little less where there is it."""
    points = tuple(Point(size, latency + per_byte * size, 0.0) for size in SIZES)
    less = tuple(Point(point.bytes, 0.9 * point.seconds, 0.0) for point in points)
    curves = {(kind, Algorithm.NATIVE): points for kind in ALGORITHMS}
    return Link("gloo", axis, 2, curves | {(kind, best): less for kind in ALGORITHMS if best in ALGORITHMS[kind]})


FAST = Table("fast", (link("dp", 1e-4, 1e-9, Algorithm.EXCHANGE), link("tp", 1e-4, 1e-9)))
SLOW = Table("slow", (link("dp", 1e-4, 1e-9), link("tp", 1e-4, 1e-6)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """Log probabilities of classes that are split over "tp"."""
    loss = model(x).log_softmax(1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled(table: Table) -> Program:
    """The program on a 2 x 2 mesh, as if its backend were gloo."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mode = spmd.DataParallel("fully_shard", mesh=mesh, params={"*": {"tp": Shard(0)}})
        train = spmd.compile(step, parallel_mode=mode, passes=(Realise(table, backend="gloo"),))
        model = nn.Linear(16, 64)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 16))
    assert train.program is not None
    return train.program


def forward_over_tp(program: Program) -> list[str]:
    nodes = [node for node in program.collectives() if node.meta.get("phase") is Phase.FORWARD]
    return [str(node.meta["collective"].kind) for node in nodes if node.meta["collective"].axis == "tp"]


def reduce_scatters(program: Program) -> set[str]:
    """The ops that perform them."""
    nodes = [node for node in program.collectives() if node.meta["collective"].kind is Kind.REDUCE_SCATTER]
    return {str(node.target) for node in nodes}


def test_a_slow_axis_changes_what_is_communicated_and_by_which_ops() -> None:
    """Along a slow axis two numbers a row are reduced, and in the end the loss; along a fast one, rows are gathered."""
    fast, slow = compiled(FAST), compiled(SLOW)
    assert forward_over_tp(fast) == ["all_gather"]
    assert forward_over_tp(slow) == ["all_reduce", "all_reduce", "all_reduce"]
    assert reduce_scatters(fast) == {"spmd_transport.swap.default"}
    assert reduce_scatters(slow) == {"_c10d_functional.reduce_scatter_tensor.default"}


def test_the_mesh_of_a_program_has_the_rates_of_the_pipeline() -> None:
    assert [axis.rate for axis in compiled(SLOW).mesh.axes] == [SLOW.rate(axis, "gloo") for axis in AXES]
    mesh = passes.Mesh(AXES)
    assert with_rates(mesh, passes.default(table=SLOW)) == with_rates(mesh, [Realise(SLOW)])
    assert table_of(passes.default(table=SLOW)) is SLOW
    assert table_of(()) is BUILT_IN and with_rates(mesh, ()) == with_rates(mesh, passes.default())


AXES = (Axis("dp", 2, "0", backend="gloo"), Axis("tp", 2, "1", backend="gloo"))


@pytest.mark.parametrize("backend", ["fake", "nccl", ""])
def test_a_backend_that_was_not_measured_has_the_default_rate(backend: str) -> None:
    mesh = passes.Mesh((Axis("dp", 4, "0", backend=backend),))
    assert with_rates(mesh, passes.default()).axes[0].rate is UNMEASURED
    assert UNMEASURED.is_small(64 * 1024) and not UNMEASURED.is_small(64 * 1024 + 1)


def test_fake_ranks_stand_for_those_of_a_given_table() -> None:
    mesh = passes.Mesh((Axis("dp", 512, "0", backend="fake"),))
    table = passes.published("H100", mesh)
    assert with_rates(mesh, passes.default(table=table)).axes[0].rate == table.rate(mesh.axes[0], "nccl")
