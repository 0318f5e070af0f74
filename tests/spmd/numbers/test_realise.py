"""Compiled steps on gloo ranks with every algorithm for collectives: the numbers stay those of the plain step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import passes
import spmd
from passes import Kind, Pass, Program, Realise
from passes.analysis.collective_algorithms import ALGORITHMS, BUILT_IN, Algorithm, Link, Point, Table
from tests.harness.cases import MLP, NARROW
from tests.harness.oracle import all_unequal, assert_agrees, compiled_run, plain_run
from tests.harness.pool import Ranks


def only(*algorithms: Algorithm) -> Table:
    """Every collective by the first of these algorithms that can do it."""
    first = {kind: next((each for each in algorithms if each in known), None) for kind, known in ALGORITHMS.items()}
    curves = {(kind, algorithm): (Point(1, 0.0, 0.0),) for kind, algorithm in first.items() if algorithm}
    return Table("only", (Link("gloo", "dp", 2, curves),))


@pytest.mark.parametrize("style, world, gather, optimizer", [
    ("replicate", 2, Algorithm.GATHER_BY_BROADCAST, "SGD"),
    pytest.param("replicate", 4, Algorithm.GATHER_BY_SENDING, "SGD", marks=pytest.mark.exhaustive),
    ("fully_shard", 2, Algorithm.GATHER_BY_SENDING, "AdamW"),
    ("fully_shard", 4, Algorithm.GATHER_BY_BROADCAST, "SGD"),
    pytest.param("default", 4, Algorithm.GATHER_BY_BROADCAST, "SGD", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_numbers_stay(ranks: Ranks, style: str, world: int, gather: Algorithm, optimizer: str) -> None:
    case = MLP(NARROW.sizes, NARROW.rows, optimizer)
    assert_agrees(ranks, world, case, style, passes.default(table=only(gather, Algorithm.EXCHANGE)))


def as_on_nccl() -> tuple[Pass, ...]:
    """The default passes, which let the backend send all members of a bucket in one launch, as gloo can too."""
    point = (Point(1, 0.0, 0.0),)
    curves = {(kind, algorithm): point for kind in ALGORITHMS for algorithm in (Algorithm.NATIVE, Algorithm.COALESCED)}
    free = Realise(Table("free", (Link("nccl", "dp", 2, curves),), {"memory": 1.0}), backend="nccl")
    return tuple(free if isinstance(each, Realise) else each for each in passes.default())


@pytest.mark.parametrize("style, world, optimizer", [
    ("fully_shard", 2, "SGD"),
    ("fully_shard", 4, "SGD"),
    ({"parallel_style": "replicate", "shard_optimizer": True}, 2, "AdamW"),
])  # fmt: skip
def test_numbers_stay_where_members_are_sent_in_one_launch(
    ranks: Ranks, style: Any, world: int, optimizer: str
) -> None:
    assert_agrees(ranks, world, MLP(NARROW.sizes, NARROW.rows, optimizer), style, as_on_nccl())


def algorithms_used(rank: int, world: int, style: Any, nccl: bool = False) -> tuple[list[str], dict[str, int]]:
    """The ops that a compiled step communicates by, and what its report counts."""
    pipeline = as_on_nccl() if nccl else passes.default(table=only(Algorithm.GATHER_BY_BROADCAST, Algorithm.EXCHANGE))
    compiled, _ = compiled_run(rank, NARROW, 1, parallel_mode=spmd.DataParallel(style), passes=pipeline)
    ops = [node.target._schema.name.split("::")[1] for node in compiled.program.collectives()]
    return sorted(ops), {str(kind): compiled.report().count(kind) for kind in Kind if compiled.report().count(kind)}


def test_ranks_use_the_algorithms_of_the_table_and_count_by_meaning(ranks: Ranks) -> None:
    gather, swap = "gather_by_broadcast", "swap"
    (replicate, counted), _ = ranks.run(2, algorithms_used, "replicate")
    assert replicate == ["all_reduce", "all_reduce"]
    assert counted == {"all_reduce": 2}  # the loss and the gradients
    (sharded, counted), _ = ranks.run(2, algorithms_used, "fully_shard")
    assert sharded == ["all_reduce", gather, swap]
    assert counted == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    (coalesced, counted), _ = ranks.run(2, algorithms_used, "fully_shard", True)
    assert coalesced == ["all_reduce", "coalesced_all_gather", "coalesced_reduce_scatter"]
    assert counted == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


@dataclass(frozen=True)
class Split(MLP):
    """Two layers whose hidden dim is split over a second axis."""

    sizes: tuple[int, ...] = (6, 8, 3)
    rows: int = 4


def on_two_axes(rank: int, world: int) -> list[str]:
    """2 x 2 ranks: the batch over the first axis, the hidden dim over the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = {"*.0.weight": {"tp": Shard(0)}, "*.0.bias": {"tp": Shard(0)}, "*.2.weight": {"tp": Shard(1)}}
    mode = spmd.DataParallel("fully_shard", mesh=mesh, params=params)
    case, table = Split(), only(Algorithm.GATHER_BY_BROADCAST, Algorithm.EXCHANGE)
    compiled, got = compiled_run(rank // 2, case, 3, parallel_mode=mode, passes=passes.default(table=table))
    assert compiled.program is not None
    _is_performed_by_others(compiled.program)
    return all_unequal(plain_run(case, 2, 3), got, rank // 2, 2)


def _is_performed_by_others(program: Program) -> None:
    axes = {node.meta["collective"].axis for node in program.collectives() if node.meta["collective"].by}
    assert axes == {"dp"}  # over "tp" there are all_reduces alone


def test_on_two_axes(ranks: Ranks) -> None:
    assert [line for lines in ranks.run(4, on_two_axes) for line in lines] == []


def weights_after(rank: int, world: int) -> list[Tensor]:
    """The weights of a replicated model after three steps in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7))
    step = spmd.compile(passes=passes.default(table=only(Algorithm.GATHER_BY_BROADCAST, Algorithm.EXCHANGE)))(MLP.step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(3):
        torch.manual_seed(10 * k + rank)
        step(model, optimizer, torch.randn(5, 33), torch.randn(5, 7))
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_replicas_keep_equal_bits(ranks: Ranks) -> None:
    first, *others = ranks.run(3, weights_after)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


OTHER_COMPUTE = replace(BUILT_IN, compute={"memory": 1e10})
TABLES = {
    "other ops": (only(Algorithm.NATIVE), only(Algorithm.EXCHANGE)),
    "the same ops": (BUILT_IN, OTHER_COMPUTE),
}


def with_its_own_table(rank: int, world: int, tables: Sequence[Table]) -> str:
    """The message on a rank whose table differs from the others'."""
    mode, table = spmd.DataParallel("fully_shard"), tables[rank]
    try:
        compiled_run(rank, NARROW, 1, parallel_mode=mode, passes=passes.default(table=table))
    except passes.RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tables", TABLES.values(), ids=list(TABLES))
def test_ranks_with_different_tables_raise(ranks: Ranks, tables: Sequence[Table]) -> None:
    for message in ranks.run(2, with_its_own_table, tables):
        assert "passes.Table, measured costs of communication" in message
        assert tables[0].digest in message and tables[1].digest in message
