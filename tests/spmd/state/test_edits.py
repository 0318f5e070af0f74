"""State that ranks have whole and that some of them write to between calls: compared, named, and made equal again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import spmd
from spmd import dispatch
from spmd._torch import local_tensor
from spmd.state import edits
from tests.harness.pool import Ranks

WORDS = "is no longer the same on all ranks of train: rank 0 has"


def build() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(rank: int, step: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rows, 4, generator=draw, dtype=torch.float64), torch.randn(rows, 2, generator=draw).double()


def noise(model: nn.Module, optimizer: Any, rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        model[0].weight.add_(torch.randn(4, 4, generator=draw))


def load(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 1:
        model.load_state_dict({name: tensor * 0 for name, tensor in model.state_dict().items()})


def forward(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 1:
        model(batch(rank, 9)[0])


def buffer(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 1:
        model[1].running_mean.fill_(0.5)


def momentum(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 1:
        optimizer.state[model[2].bias]["momentum_buffer"].zero_()


def replaced(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 1:
        model[1].running_var = model[1].running_var + 1


EDITS = {
    noise: "model.0.weight",
    load: "model.0.weight",
    forward: "model.1.num_batches_tracked",
    buffer: "model.1.running_mean",
    replaced: "1.running_var",
}


def parted(rank: int, world: int, edit: Callable[..., None], mode: Any, rows: int) -> tuple[list[str], list[Tensor]]:
    """The errors of two calls after an edit, the second by a program of other rows; then calls after ``recover``."""
    model, optimizer = build()
    step = spmd.compile(train, parallel_mode=mode)
    for k in range(3):
        step(model, optimizer, *batch(rank, k))
    edit(model, optimizer, rank)
    errors = []
    for k in (3, 4):
        with pytest.raises(spmd.RankMismatchError) as caught:
            step(model, optimizer, *batch(rank, k, rows if k == 3 else 3))
        errors.append(str(caught.value))
    step.recover()
    for k in (5, 6):
        step(model, optimizer, *batch(rank, k))
    return errors, [tensor.detach().clone() for tensor in map(local_tensor, spmd.state_dict(model).values())]


CASES = [
    (noise, "replicate", 3), (load, "replicate", 2), (forward, "replicate", 3), (buffer, "fully_shard", 3), 
    (replaced, "zero1", 3), (momentum, "replicate", 3),
]  # fmt: skip


@pytest.mark.parametrize("edit, mode, rows", CASES)
def test_an_edit_that_parts_the_ranks_is_named_and_can_be_mended(ranks: Ranks, edit: Any, mode: str, rows: int) -> None:
    (errors, states), (also, others) = ranks.run(2, parted, edit, mode, rows)
    assert errors == also and all(WORDS in each for each in errors), errors
    assert EDITS.get(edit, "momentum_buffer[model.2.bias]") in errors[0]
    assert ("on all ranks: make" if edit is noise else "on rank 1 alone: make") in errors[0]
    assert all(map(torch.equal, states, others))


def scaled(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank == 3:
        with torch.no_grad():
            model[0].weight.mul_(2)


def parted_replicas(rank: int, world: int) -> tuple[list[str], list[Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return parted(rank, world, scaled, spmd.DataParallel("fully_shard", mesh=mesh), 3)


def test_an_edit_that_parts_the_replicas_of_a_shard_is_named_and_can_be_mended(ranks: Ranks) -> None:
    """Rank 3 writes to its shard, which rank 1 has, too; no other rank has another copy of it."""
    results = ranks.run(4, parted_replicas)
    assert all(errors == results[0][0] for errors, _ in results)
    assert "model.0.weight is no longer the same on all ranks of train: rank 1 has" in results[0][0][0]
    for (_, states), (_, others) in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, states, others))


def equal_edits(rank: int, world: int, mode: Any) -> tuple[list[float], int, list[Tensor]]:
    """An optimizer outside of the step, the same noise on all ranks, and a file that one rank alone has."""
    model, optimizer = build()
    compared = []
    before = edits.hash_of

    @spmd.compile(parallel_mode=mode)
    def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    def hash_of(tensor: Tensor) -> str:
        compared.append(tensor)
        return before(tensor)

    edits.hash_of = hash_of
    try:
        losses = []
        for k in range(9):
            losses.append(float(gradients(model, *batch(rank, k))))
            optimizer.step()
            optimizer.zero_grad()
        number = len(compared)
        noise(model, optimizer, 0)
        losses.append(float(gradients(model, *batch(rank, 9))))
    finally:
        edits.hash_of = before
    return losses, number, [tensor.detach().clone() for tensor in model.state_dict().values()]


def test_equal_edits_are_fine_and_seldom_compared(ranks: Ranks) -> None:
    (losses, number, states), (others, _, same) = ranks.run(2, equal_edits, "replicate")
    assert losses == others and all(map(torch.equal, states, same))
    assert number == 6 * 4, "six parameters, in the first, second, fourth and eighth call after an update"
    model, optimizer = build()
    for k in range(10):
        if k == 9:
            noise(model, optimizer, 0)
        x, y = (torch.cat(parts) for parts in zip(batch(0, k), batch(1, k), strict=True))
        loss = F.mse_loss(model(x), y)
        torch.testing.assert_close(float(loss.detach()), losses[k], rtol=1e-9, atol=1e-10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def compared_calls(rank: int, world: int, mode: Any, passes: Any) -> int:
    """How often ranks compare edits in calls between which nothing is written."""
    calls, before = [0], dispatch.compare_edits

    def compare(*args: Any) -> Any:
        calls[0] += 1
        return before(*args)

    dispatch.compare_edits = compare  # type: ignore[assignment]
    try:
        model, optimizer = build()
        step = spmd.compile(train, parallel_mode=mode, passes=passes)
        for k in range(6):
            step(model, optimizer, *batch(rank, k))
    finally:
        dispatch.compare_edits = before
    return calls[0]


@pytest.mark.parametrize("mode, passes", [("replicate", None), ("replicate", ()), ("fully_shard", None)])
def test_nothing_is_compared_where_nothing_was_written(ranks: Ranks, mode: str, passes: Any) -> None:
    assert ranks.run(2, compared_calls, mode, passes) == [0, 0]


def test_a_tensor_is_not_taken_for_a_dead_one_of_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "_last", None)
    monkeypatch.setattr(edits, "_versions", {})
    names = [f"w{k}" for k in range(900)]
    own = edits.Edits(names, dict.fromkeys(names, ""))
    for _ in range(5):
        kept = [torch.zeros(2) for _ in names]  # others than those before, which die
        own.note(kept)
        own.close()
    assert len(edits._versions) < 3000 and edits._known(kept[0]) == 0
    dead, new = torch.zeros(2), torch.ones(2)
    edits._versions[id(new)] = weakref.ref(dead), 7
    del dead
    assert edits._known(new) is None
