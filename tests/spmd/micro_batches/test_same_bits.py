"""``bits="same"``: state has the same bits on 1, 2, 3 and 4 ranks; and it is that of the plain step."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import spmd
from examples.gpt import GPT, Config
from passes.runtime.local_peers import LocalPeers
from tests.harness.pool import Ranks

CONFIG = Config(width=32, layers=1, heads=2, context=16)
STEPS = 4


def train(
    model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, autocast: bool = False, drop: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Labels that count are unequally many in each part; gradients are clipped."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = F.dropout(model(x), drop) if drop else model(x)
        loss = F.cross_entropy(scores.flatten(0, 1).float(), torch.where(y < 180, y, -100).flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def penalized(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor]:
    """A term of whole parameters, and gradients that are kept: neither is a sum over rows."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss = torch.stack([loss, 0.01 * sum((p.square().sum() for p in model.parameters()), torch.zeros(()))]).sum()
    loss.backward()
    optimizer.step()
    return (loss,)


def weighted(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    weights = 0.1 + (y % 7) / 3
    each = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").unflatten(0, y.shape)
    loss = (each * weights).sum() / weights.sum()
    loss.backward()
    optimizer.step()
    return loss


def build(optimizer: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    make = torch.optim.AdamW if optimizer == "AdamW" else torch.optim.SGD
    options = {} if optimizer == "AdamW" else {"momentum": 0.9}
    return model, make(model.parameters(), lr=0.05, **options)


def rows(step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    own = torch.randint(0, CONFIG.vocabulary, (16, CONFIG.context + 1), generator=draw).chunk(world)[rank]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def mode(world: int, in_pairs: bool = False) -> spmd.DataParallel:
    options: dict[str, Any] = {}
    if in_pairs:
        options |= {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), "axes": {"batch": ("a", "b")}}
    return spmd.DataParallel(bits="same", **options)


def digest(model: nn.Module, optimizer: Any, results: list[Any]) -> str:
    tensors = [*model.parameters(), *(each[key] for each in optimizer.state.values() for key in sorted(each))]
    found = hashlib.sha256(repr(results).encode())
    for each in tensors:
        found.update(each.detach().numpy().tobytes())
    return found.hexdigest()


def trained(
    rank: int, world: int, function: Any, optimizer: str, options: dict[str, Any], in_pairs: bool = False
) -> str:
    objects = build(optimizer)
    step, results = spmd.compile(function, parallel_mode=mode(world, in_pairs)), []
    spmd.seed(3)
    try:
        for k in range(STEPS):
            results.append([each.item() for each in step(*objects, *rows(k, rank, world), **options)])
    finally:
        spmd.seed(None)
    return digest(*objects, results)


@pytest.mark.parametrize(
    ("function", "optimizer", "options", "worlds"),
    [
        (train, "AdamW", {"drop": 0.3}, [(1, False), (4, True)]),
        (train, "SGD", {"autocast": True}, [(1, False), (2, False)]),
        (penalized, "SGD", {}, [(1, False), (3, False)]),  # of 6, 6 and 4 rows
    ],
    ids=["dropout", "autocast", "penalized"],
)
def test_state_has_the_same_bits_on_any_number_of_ranks(
    ranks: Ranks, function: Any, optimizer: str, options: dict[str, Any], worlds: list[tuple[int, bool]]
) -> None:
    found = []
    for world, in_pairs in worlds:
        found += ranks.run(world, trained, function, optimizer, options, in_pairs)
    assert len({*found}) == 1, found


def continued(rank: int, world: int, folder: Path, steps: range) -> str:
    """What is there after some steps, from the checkpoint of the steps before."""
    model, optimizer = build("SGD")
    step, results = spmd.compile(train, parallel_mode=mode(world)), []
    spmd.seed(3)
    try:
        if steps.start:
            spmd.load(folder, model=model, optimizer=optimizer)
        for k in steps:
            results.append([each.item() for each in step(model, optimizer, *rows(k, rank, world), drop=0.3)])
        spmd.save(folder, step=steps.stop, model=model, optimizer=optimizer)
    finally:
        spmd.seed(None)
    return digest(model, optimizer, results[-1:])


def test_runs_that_go_on_with_fewer_ranks_have_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    for world, start in [(4, 0), (3, 2), (2, 4)]:
        parts = ranks.run(world, continued, tmp_path / "parts", range(start, start + 2))
    assert {*parts} == {*ranks.run(1, continued, tmp_path / "whole", range(6))}


@pytest.mark.usefixtures("alone")
def test_it_is_the_plain_step() -> None:
    """Beside the plain step on the whole batch, in fp64; and all ranks in one process, stage by stage."""
    results: list[Any] = []
    for compiles in (False, True):
        model, optimizer = build("SGD")
        model.double()
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(bits="same", virtual=4)) if compiles else train
        results.append([step(model, optimizer, *rows(k)) for k in range(3)] + [list(model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-9)
    for world in (2, 3):
        verdict = spmd.verify(spmd.compile(train, parallel_mode=mode(world)), *build("SGD"), *rows(0), world=world)
        assert verdict, verdict


def shows_rows(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    F.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    return scores


@pytest.mark.usefixtures("alone")
def test_rows_on_three_ranks_are_refused() -> None:
    with pytest.raises(spmd.PartitionError, match=r'has rows of the batch, which bits="same" returns on 1, 2, 4'):
        spmd.verify(spmd.compile(shows_rows, parallel_mode=mode(3)), *build("SGD"), *rows(0), world=3)


def refused(rank: int, world: int) -> list[str]:
    found = []
    cases = [(spmd.DataParallel(bits="same", virtual=2), 8), (spmd.DataParallel(bits="same"), 3)]
    for given, count in cases:
        try:
            x, y = rows(0, rank, world)
            spmd.compile(train, parallel_mode=given)(*build("SGD"), x[:count], y[:count])
        except spmd.PartitionError as error:
            found.append(str(error))
    return found


def test_what_does_not_divide_is_refused(ranks: Ranks) -> None:
    few, rest = ranks.run(2, refused)[0]
    assert "takes at least two virtual parts on each rank, but has virtual=2 for 2 ranks: pass virtual=4" in few
    assert "cuts the global batch into 8 equal parts, but x has 6 rows: pass a multiple of 8" in rest
    for options, message in [
        ({"parallel_style": "fully_shard"}, 'expected parallel_style="replicate" with bits="same"'),
        ({"micro_batches": 2}, 'expected no micro_batches with bits="same"'),
        ({"virtual": 6}, "expected virtual, the parts of the global batch, to be 2, 4, 8, ..., got 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            spmd.DataParallel(bits="same", **options)


@pytest.mark.usefixtures("alone")
def test_a_sum_of_floats_that_parts_need_is_refused() -> None:
    with pytest.raises(spmd.PartitionError, match="is a sum of floats that each part of the batch needs"):
        spmd.compile(weighted, parallel_mode=spmd.DataParallel(bits="same"))(*build("SGD"), *rows(0))


def test_a_backend_that_chooses_by_time_is_refused() -> None:
    with pytest.raises(ValueError, match='expected backend="aten" with bits="same"'):
        spmd.compile(train, parallel_mode=spmd.DataParallel(bits="same"), backend="inductor")


def late(rank: int, world: int) -> list[list[float]]:
    """The losses where one rank reads what its peers have published long after they did."""
    collect = LocalPeers.collect

    def collect_late(self: LocalPeers, number: int) -> Any:
        found = collect(self, number)
        time.sleep(0.03 * rank)
        return found

    LocalPeers.collect = collect_late  # type: ignore[method-assign]
    try:
        objects = build("SGD")
        step = spmd.compile(train, parallel_mode=spmd.DataParallel(micro_batches=4))
        return [[each.item() for each in step(*objects, *rows(k, rank, world))] for k in range(2)]
    finally:
        LocalPeers.collect = collect  # type: ignore[method-assign]


def test_a_run_leaves_what_peers_still_read(ranks: Ranks) -> None:
    """Each run counts labels on all ranks, in memory that the next run computes in."""
    objects = build("SGD")
    expected = [[each.item() for each in train(*objects, *rows(k))] for k in range(2)]
    for found in ranks.run(2, late):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
