"""Ranks of one host share memory: along which axes, with the same numbers, and with an error when a rank leaves."""

from __future__ import annotations

import errno
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import passes
import spmd
from passes import Program, ReduceInPlace, ReuseMemory
from passes.analysis.collective_algorithms import Algorithm
from passes.ir.collectives import is_shared
from passes.runtime import local_peers
from spmd.ranks import local_ranks
from spmd.ranks.world import describe
from tests.harness.cases import MLP, NARROW
from tests.harness.oracle import all_unequal, assert_agrees, compiled_run, plain_run, snapshot
from tests.harness.pool import RankError, Ranks

from ..numbers.test_realise import Split, only

SHARED = passes.default(table=only(Algorithm.SHARED))


def in_shared_memory(program: Program | None) -> list[bool]:
    """For each collective, whether it goes through shared memory."""
    assert program is not None
    return [is_shared(node) for node in program.collectives()]


# Three ranks that replicate are below.
OTHERS = (("replicate", 3, "SGD"), ("fully_shard", 2, "AdamW"), ("default", 2, "SGD"))


@pytest.mark.parametrize("style, world, optimizer", [
    ("replicate", 2, "SGD"),
    ("fully_shard", 3, "SGD momentum"),
    *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in OTHERS),
])  # fmt: skip
def test_numbers_are_the_same(ranks: Ranks, style: str, world: int, optimizer: str) -> None:
    case = MLP(NARROW.sizes, NARROW.rows, optimizer)
    assert_agrees(ranks, world, case, style, SHARED)


def test_numbers_are_the_same_where_each_of_three_ranks_reduces_a_part(ranks: Ranks) -> None:
    assert_agrees(ranks, 3, MLP((48, 64, 32), NARROW.rows, "SGD"), "replicate", SHARED, 3)


@pytest.mark.parametrize("world, optimizer", [(2, "AdamW fused"), (3, "SGD")])
def test_numbers_are_the_same_where_gradients_are_reduced_in_place(ranks: Ranks, world: int, optimizer: str) -> None:
    pipeline = [ReduceInPlace(min_bytes=1) if isinstance(each, ReduceInPlace) else each for each in SHARED]
    assert_agrees(ranks, world, MLP((48, 64, 32), NARROW.rows, optimizer), "replicate", pipeline)


def test_numbers_are_the_same_without_planned_memory(ranks: Ranks) -> None:
    pipeline = [each for each in SHARED if not isinstance(each, ReuseMemory)]
    assert_agrees(ranks, 2, MLP(NARROW.sizes, NARROW.rows, "SGD"), "fully_shard", pipeline, 3)


def test_numbers_are_the_same_where_each_rank_updates_a_part(ranks: Ranks) -> None:
    mode = {"parallel_style": "replicate", "shard_optimizer": True}
    assert_agrees(ranks, 2, MLP(NARROW.sizes, NARROW.rows, "AdamW"), mode, SHARED, 3)


def shared_by_default(rank: int, world: int) -> tuple[list[bool], list[bool], bool]:
    """What is shared with the default passes, what without any, and whether ranks were connected for the latter."""
    bare, _ = compiled_run(rank, NARROW, 1, passes=())
    (group,) = bare._dispatch.programs.last.connection.groups
    connected = local_peers.local_peers_of(group.group_name, group) is not None
    compiled, _ = compiled_run(rank, NARROW, 2)
    return in_shared_memory(compiled.program), in_shared_memory(bare.program), connected


def test_by_default_local_ranks_use_shared_memory(ranks: Ranks) -> None:
    for default, bare, connected in ranks.run(2, shared_by_default):
        assert default == [True, True]
        assert bare and not any(bare) and not connected


def train_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def dispatched(rank: int, world: int) -> list[str]:
    """The collectives that torch dispatches in a second call, of an all_gather, a reduce_scatter and an all_reduce."""
    model = torch.nn.Linear(4, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters())
    train = spmd.compile(train_once, None, spmd.DataParallel("fully_shard"), passes=SHARED)
    train(model, optimizer, torch.ones(2, 4, dtype=torch.float64))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, optimizer, torch.ones(2, 4, dtype=torch.float64))
    return [each.key for each in profile.key_averages() if each.key.startswith("spmd_transport::")]


def test_a_collective_on_fixed_tensors_is_prepared_once(ranks: Ranks) -> None:
    assert ranks.run(2, dispatched) == [[]] * 2


def after_a_failure(rank: int, world: int) -> tuple[list[str], int, bool]:
    """Four steps, before the third of which the connection is lost."""
    case = NARROW
    torch.manual_seed(0)
    model, optimizer = case.build()
    step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"), passes=SHARED)(case.step)
    for k in range(4):
        if k == 2:
            step._dispatch.programs.last.connection.close()
        result = step(model, optimizer, *case.part(rank, k))
    expected = plain_run(case, world, 4)
    got = [snapshot(result, (model, optimizer))]
    return all_unequal(expected[-1:], got, rank, world), len(step.programs), any(in_shared_memory(step.program))


def test_ranks_that_gave_up_on_each_other_reconnect(ranks: Ranks) -> None:
    assert ranks.run(2, after_a_failure) == [([], 1, True)] * 2  # those of the lost connection are dropped


def as_other_hosts(rank: int, world: int) -> list[bool]:
    """2 x 2 ranks on two hosts, so that one axis is shared and the other is not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_ranks, "_host", lambda: f"host {rank // 2}")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        params = {"*.0.weight": {"tp": Shard(0)}, "*.0.bias": {"tp": Shard(0)}, "*.2.weight": {"tp": Shard(1)}}
        mode = spmd.DataParallel("fully_shard", mesh=mesh, params=params)
        case = Split(optimizer="SGD")
        compiled, got = compiled_run(rank // 2, case, 3, parallel_mode=mode, passes=SHARED)
        assert compiled.program is not None
        axes = {(node.meta["collective"].axis, is_shared(node)) for node in compiled.program.collectives()}
        assert axes == {("dp", False), ("tp", True)}
        return all_unequal(plain_run(case, 2, 3), got, rank // 2, 2)


def test_each_axis_is_shared_or_not(ranks: Ranks) -> None:
    assert [line for lines in ranks.run(4, as_other_hosts) for line in lines] == []


def without_such_memory(rank: int, world: int) -> list[bool]:
    """What is shared on a system without shared memory and Unix sockets."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_ranks, "_host", lambda: "")
        patched.setattr(local_ranks, "_unix_socket", None)
        compiled, _ = compiled_run(rank, NARROW, 1)
    return in_shared_memory(compiled.program)


def test_a_system_without_shared_memory_uses_the_backend(ranks: Ranks) -> None:
    assert ranks.run(2, without_such_memory) == [[False, False]] * 2


def after_another_group(rank: int, world: int) -> list[bool]:
    """What is shared in a new process group of the same name."""
    compiled_run(rank, NARROW, 1)
    name, store = dist.group.WORLD.group_name, dist.distributed_c10d._get_default_store()  # type: ignore[union-attr]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    assert dist.group.WORLD.group_name == name  # type: ignore[union-attr]
    compiled, _ = compiled_run(rank, NARROW, 2)
    return in_shared_memory(compiled.program)


def test_a_new_process_group_is_connected_too(ranks: Ranks) -> None:
    assert ranks.run(2, after_another_group) == [[True, True]] * 2


def one_leaves(rank: int, world: int) -> None:
    """Rank 1 ends while rank 0 waits for its operand."""
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    groups = {0: device_mesh.get_group(0)}
    mesh, _ = local_ranks.connect_local_ranks(describe(device_mesh), groups, _all_gather_text)
    assert mesh.axes[0].shared
    group = mesh.axes[0].group
    x = torch.ones(4)
    started = torch.ops.spmd_transport.shared_all_reduce(x, None, "sum", group)
    assert torch.ops._c10d_functional.wait_tensor(started).tolist() == [2.0] * 4
    if rank == 1:
        os._exit(1)
    torch.ops._c10d_functional.wait_tensor(torch.ops.spmd_transport.shared_all_reduce(x, None, "sum", group))


def _all_gather_text(text: str) -> list[str]:
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def test_a_rank_that_ends_raises_on_the_others(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1 of the group has ended or left it"):
        ranks.run(2, one_leaves)


def refused(rank: int, world: int, name: str) -> tuple[list[bool], list[str], list[bool]]:
    """What is shared, and what the report notes, where rank 1 is refused something; then what is shared."""
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            owner, _, attribute = name.rpartition(".")
            patched.setattr(f"{owner}.{attribute}", _refuse)
        before, _ = compiled_run(rank, NARROW, 2)
    after, _ = compiled_run(rank, NARROW, 2)
    return in_shared_memory(before.program), list(before.report().notes), in_shared_memory(after.program)


def _refuse(*_: object) -> None:
    raise OSError(errno.EMFILE, "refused here")


@pytest.mark.parametrize("name, note", [
    ("os.memfd_create", "rank 1 cannot share memory: .*refused here"),
    ("spmd.ranks.local_ranks._unix_socket", "rank 1 cannot share memory: .*refused here"),
    ("spmd.ranks.local_ranks._connect", "rank 1 could not connect to the others on its host: .*refused here"),
])  # fmt: skip
def test_if_a_rank_is_refused_to_share_memory_all_send_messages(ranks: Ranks, name: str, note: str) -> None:
    for before, notes, after in ranks.run(3, refused, name):
        assert before == [False, False] and after == [True, True]
        assert any(re.search(f"{note}.* all ranks communicate by messages", each) for each in notes)


def with_strangers(rank: int, world: int) -> list[bool]:
    """What is shared where other processes connect first, and say nothing, anything, or another rank's name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local_ranks._Listener, "__enter__", _visited(local_ranks._Listener.__enter__))
        compiled, got = compiled_run(rank, NARROW, 2)
    assert all_unequal(plain_run(NARROW, world, 2), got, rank, world) == []
    return in_shared_memory(compiled.program)


def _visited(enter: Any) -> Any:
    def entered(listener: Any) -> Any:
        made = enter(listener)
        for sent in (None, b"hello", b"7", b"[]", b'["a", 0, 1]', b'["", [], {}]', b"\xff"):
            stranger = local_ranks._unix_socket()
            stranger.connect(local_ranks._abstract_address(listener.address[0]))
            if sent is not None:
                stranger.send(sent)
            strangers.append(stranger)
        return made

    return entered


strangers: list[Any] = []


def test_strangers_who_connect_are_ignored(ranks: Ranks) -> None:
    assert ranks.run(2, with_strangers) == [[True, True]] * 2
