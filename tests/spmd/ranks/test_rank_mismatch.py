"""Ranks that would run different programs in one call raise, all of them, and go on afterwards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import spmd
from tests.harness.cases import MLP
from tests.harness.meeting import wait_for
from tests.harness.pool import RankError, Ranks

CASE = MLP(sizes=(15, 4), rows=6)
PROMPT = 30.0  # seconds in which the other ranks raise; their group would wait for longer, and a machine may be busy
SHORT = 50.0  # seconds that their group waits: where these are under a minute, each rank captures for itself


def with_flag(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, flag: bool) -> Tensor:
    loss = F.mse_loss(model(x), y) if flag else F.l1_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def other_shape(rank: int, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return (x.unsqueeze(1), y.unsqueeze(1), True) if rank else (x, y, True)


def other_flag(rank: int, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x, y, rank == 0


def other_dtype(rank: int, x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x, y.float() if rank else y, True


BEFORE = {"nothing compiled": (), "one of them compiled": (0,), "both compiled": (0, 1)}


def mismatch(rank: int, world: int, disagree: Any, before: tuple[int, ...]) -> str:
    """Calls that are the same on all ranks (as rank 0 or 1 will make them), then one that differs, then a good one."""
    objects = CASE.build()
    step = spmd.compile(with_flag)
    for other in before:
        for k in range(3):
            step(*objects, *disagree(other, *CASE.part(rank, k)))
    programs = len(step.programs)
    states = [p.detach().clone() for p in objects[0].parameters()]
    with pytest.raises(spmd.RankMismatchError) as caught:
        step(*objects, *disagree(rank, *CASE.part(rank, 3)))
    assert all(map(torch.equal, states, objects[0].parameters()))
    assert len(step.programs) == programs
    for k in range(4, 6):
        assert torch.isfinite(step(*objects, *disagree(0, *CASE.part(rank, k))))
    return str(caught.value)


DIFFERENCES = {
    other_shape: ["x of shape", "[6, 15]", "[6, 1, 15]", "must pad to one length"],
    other_flag: ["flag", "True", "False"],
    other_dtype: ["y", "float32"],
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("disagree", DIFFERENCES, ids=lambda function: function.__name__)
@pytest.mark.in_turn("before")
def test_ranks_that_differ_raise_together_and_name_the_difference(ranks: Ranks, disagree: Any, before: str) -> None:
    messages = ranks.run(2, mismatch, disagree, BEFORE[before], timeout=SHORT)
    for message in messages:
        assert all(word in message for word in DIFFERENCES[disagree]), message


def scaled(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    loss = F.mse_loss(model(x) * table, y) * scale
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def drift(rank: int, world: int, what: str, before: int) -> str:
    """Equal calls, then one for which ranks come with other values, then an equal one."""
    model, optimizer = CASE.build()
    step = spmd.compile(scaled, parallel_mode=spmd.DataParallel(inputs={"table": Replicate()}))
    scale, table = torch.tensor(0.5), torch.ones(4, dtype=torch.float64)
    for k in range(before):
        step(model, optimizer, *CASE.part(rank, k), scale, table)
    if what == "lr":
        optimizer.param_groups[0]["lr"] = 0.25 + rank
    if what == "written":
        table[0] += rank
    scales = {"scale": scale + rank, "sign": torch.tensor(-1.0 - rank)}
    given = scales.get(what, scale), table + rank if what == "table" else table
    with pytest.raises(spmd.RankMismatchError) as caught:
        step(model, optimizer, *CASE.part(rank, before), *given)
    optimizer.param_groups[0]["lr"] = 0.01
    table.fill_(1.0)
    assert torch.isfinite(step(model, optimizer, *CASE.part(rank, before), scale, table))
    return str(caught.value)


@pytest.mark.parametrize("what, before, words", [
    ("lr", 0, ["optimizer.0.lr = 0.25", "optimizer.0.lr = 1.25"]), ("lr", 2, ["0.lr = 0.25", "0.lr = 1.25"]),
    ("scale", 0, ["scale = [0.5]", "scale = [1.5]"]), ("scale", 2, ["scale = 0.5", "scale = 1.5"]),
    ("sign", 2, ["scale = -1.0", "scale = -2.0"]),
    ("table", 0, ["table = [1.0, 1.0, 1.0, 1.0]", "table = [2.0, 2.0"]),
    ("table", 2, ["table = [1.0, 1.0, 1.0, 1.0]", "table = [2.0, 2.0"]),
    ("written", 2, ["table = [1.0, 1.0, 1.0, 1.0]", "table = [2.0, 1.0"]),
])  # fmt: skip
def test_values_that_must_be_equal_are_compared(ranks: Ranks, what: str, before: int, words: list[str]) -> None:
    """Learning rates, 0-dim tensors and replicated arguments, when ranks compile and at each call."""
    for message in ranks.run(2, drift, what, before):
        assert all(word in message for word in words), message


class Buffered:
    """Holds the batch in tensors of its own, as trainers with static buffers do."""

    def __init__(self) -> None:
        self.model, self.optimizer = CASE.build()
        self.x, self.y = (torch.zeros_like(each) for each in CASE.part(0, 0))

    def step(self) -> Tensor:
        return CASE.step(self.model, self.optimizer, self.x, self.y)


def filled(rank: int, world: int, reached: str) -> str:
    """Rows are filled in after the step was compiled: the same on all ranks, which is right, then each rank's own."""
    trainer = Buffered()

    def closed() -> Tensor:
        return CASE.step(trainer.model, trainer.optimizer, trainer.x, trainer.y)

    step = spmd.compile(trainer.step if reached == "self" else closed)
    for k in range(3):
        step()
        trainer.x.copy_(CASE.part(0, k)[0])
    states = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.x.copy_(CASE.part(rank, 3)[0])
    with pytest.raises(spmd.RankMismatchError) as caught:
        step()
    assert all(map(torch.equal, states, trainer.model.parameters()))
    trainer.x = torch.zeros_like(trainer.x)
    assert torch.isfinite(step())
    return str(caught.value)


@pytest.mark.parametrize("reached", ["self", "closure"])
def test_tensors_found_by_name_are_compared_when_they_are_written_to(ranks: Ranks, reached: str) -> None:
    for message in ranks.run(2, filled, reached):
        name = "self.x" if reached == "self" else "closed.x"
        assert f"{name}, which is no argument" in message and "pass rows of the batch as arguments" in message, message


def branching(rank: int, world: int) -> str:
    """Rank 0 evaluates, the other does not."""

    def evaluate(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).sum()

    model, optimizer = CASE.build()
    step, evaluation = spmd.compile(CASE.step), spmd.compile(evaluate)
    for k in range(3):
        step(model, optimizer, *CASE.part(rank, k))
    with pytest.raises(spmd.RankMismatchError) as caught:
        if rank == 0:
            evaluation(model, CASE.part(rank, 3)[0])
        step(model, optimizer, *CASE.part(rank, 3))
    assert torch.isfinite(step(model, optimizer, *CASE.part(rank, 4)))
    return str(caught.value)


def test_a_branch_on_the_rank_raises_on_all(ranks: Ranks) -> None:
    for message in ranks.run(2, branching, timeout=SHORT):
        assert "evaluate" in message and "step" in message


def absent(rank: int, world: int, given_up: Path) -> str:
    """Rank 1 comes too late to compile: once rank 0 has given up."""
    objects = CASE.build()
    step = spmd.compile(timeout=1.0)(CASE.step)
    if rank == 1:
        wait_for(given_up)
    start = time.monotonic()
    with pytest.raises(spmd.RankMismatchError) as caught:
        step(*objects, *CASE.part(rank, 0))
    given_up.touch()
    assert time.monotonic() - start < PROMPT
    return str(caught.value)


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(ranks: Ranks, tmp_path: Path) -> None:
    assert "waited 1 s" in ranks.run(2, absent, tmp_path / "given up", timeout=SHORT)[0]


def dying(rank: int, world: int, calls: int, report: Path) -> None:
    """Rank 1 dies after some calls."""
    objects = CASE.build()
    step = spmd.compile(CASE.step)
    for k in range(calls):
        step(*objects, *CASE.part(rank, k))
    if rank == 1:
        os._exit(7)
    start = time.monotonic()
    try:
        step(*objects, *CASE.part(rank, calls))
    except spmd.RankMismatchError as error:
        report.write_text(f"{time.monotonic() - start:.1f} s: {error}")


@pytest.mark.parametrize("calls", [0, 3])
def test_a_rank_that_died_raises_on_the_others(ranks: Ranks, tmp_path: Path, calls: int) -> None:
    with pytest.raises(RankError, match="died with exit code 7"):
        ranks.run(2, dying, calls, tmp_path / "report", grace=60, timeout=SHORT)
    seconds, _, message = (tmp_path / "report").read_text().partition(" s: ")
    assert float(seconds) < PROMPT and "ended" in message


def other_seeds(rank: int, world: int) -> None:
    """After the step has compiled, the ranks set different seeds."""
    model = nn.Sequential(nn.Linear(15, 4), nn.Dropout(0.5)).double()
    step = spmd.compile(CASE.step)
    objects = model, torch.optim.SGD(model.parameters(), lr=0.1)
    spmd.seed(0)
    for k in range(2):
        step(*objects, *CASE.part(rank, k))
    spmd.seed(rank)
    with pytest.raises(spmd.RankMismatchError, match=r"spmd\.seed"):
        step(*objects, *CASE.part(rank, 2))
    spmd.seed(3)
    assert torch.isfinite(step(*objects, *CASE.part(rank, 3)))


def test_ranks_with_other_seeds_raise_together(ranks: Ranks) -> None:
    ranks.run(2, other_seeds, timeout=SHORT)


def wrong_call(rank: int, world: int) -> None:
    """Rank 1 leaves an argument out."""
    objects = CASE.build()
    step = spmd.compile(CASE.step)
    for k in range(2):
        step(*objects, *CASE.part(rank, k))
    x, y = CASE.part(rank, 2)
    with pytest.raises(TypeError if rank else spmd.RankMismatchError, match="missing a required argument"):
        step(*objects, *((x,) if rank else (x, y)))
    assert torch.isfinite(step(*objects, x, y))


def test_a_wrong_call_on_one_rank_raises_on_all(ranks: Ranks) -> None:
    ranks.run(2, wrong_call, timeout=SHORT)


def axes(rank: int, world: int) -> None:
    """On a mesh of two axes, one rank of four differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    objects = CASE.build()
    step = spmd.compile(parallel_mode=spmd.DTensorExpand(mesh=mesh))(with_flag)
    for flag in (True, False):
        step(*objects, *CASE.part(0, 0), flag)
        step(*objects, *CASE.part(0, 0), flag)
    with pytest.raises(spmd.RankMismatchError, match="flag"):
        step(*objects, *CASE.part(0, 1), rank == 3)
    assert torch.isfinite(step(*objects, *CASE.part(0, 2), True))


def test_one_of_four_ranks_on_two_axes(ranks: Ranks) -> None:
    ranks.run(4, axes)


def other_model(rank: int, world: int) -> None:
    sizes = (15, 17 + rank, 4)
    case = MLP(sizes=sizes, rows=6)
    with pytest.raises(spmd.RankMismatchError):
        spmd.compile(case.step)(*case.build(), *case.part(rank, 0))


def test_ranks_with_different_models_raise_together(ranks: Ranks) -> None:
    ranks.run(2, other_model, timeout=SHORT)


def one_fails(rank: int, world: int) -> None:
    """Rank 1's own transformation fails: rank 0 raises, too, and both can go on."""

    def transformation(gm: Any) -> Any:
        if rank == 1:
            raise ValueError("not on this rank")
        return gm

    objects = CASE.build()
    with pytest.raises(spmd.PassError if rank else spmd.RankMismatchError, match="not on this rank"):
        spmd.compile(None, transformation)(CASE.step)(*objects, *CASE.part(rank, 0))
    assert torch.isfinite(spmd.compile(CASE.step)(*objects, *CASE.part(rank, 1)))


def test_a_rank_that_fails_to_compile_raises_on_all(ranks: Ranks) -> None:
    ranks.run(2, one_fails, timeout=SHORT)


def unequal(rank: int, world: int, rows: list[int], lengths: list[int], others: int) -> str:
    mode = spmd.DataParallel(inputs={"x": Shard(0), "other": Shard(0)})
    with pytest.raises(spmd.RankMismatchError) as caught:
        spmd.compile(lambda x, other: x.sum() + other.sum(), parallel_mode=mode)(
            torch.ones(rows[rank], lengths[rank]), torch.ones(others)
        )
    return str(caught.value)


@pytest.mark.parametrize("rows, lengths, sentence", [
    ([4, 3], [9, 9], "rank 0 passed x of shape [4, 9], rank 1 [3, 9]. Ranks may bring unequal numbers of rows, but"),
    ([4, 0], [9, 9], "rank 0 passed x of shape [4, 9], rank 1 [0, 9]. Ranks may bring unequal numbers of rows, but"),
    ([4, 4], [9, 7], "rank 0 passed x of shape [4, 9], rank 1 [4, 7]. Ranks that pad their own batches must pad"),
])  # fmt: skip
def test_shapes_that_differ_are_refused(ranks: Ranks, rows: list[int], lengths: list[int], sentence: str) -> None:
    for others in (2, 0):  # rows of the other argument
        for message in ranks.run(2, unequal, rows, lengths, others, timeout=SHORT):
            assert sentence in message


def interrupted(rank: int, world: int) -> str:
    """Rank 1 is interrupted while it compiles, as by Ctrl-C; then all go on."""
    objects, interrupt = CASE.build(), rank == 1

    def step(*arguments: Any) -> Tensor:
        if interrupt:
            raise KeyboardInterrupt
        return with_flag(*arguments)

    compiled, start = spmd.compile(step), time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank == 1 else spmd.RankMismatchError) as caught:
        compiled(*objects, *CASE.part(rank, 0), True)
    assert time.monotonic() - start < PROMPT
    interrupt = False
    assert torch.isfinite(compiled(*objects, *CASE.part(rank, 1), True))
    return str(caught.value)


def test_a_rank_that_is_interrupted_raises_on_the_others(ranks: Ranks) -> None:
    messages = ranks.run(2, interrupted, timeout=SHORT)
    assert "rank 1 raised KeyboardInterrupt. State is on rank 0 as before the call" in messages[0]
