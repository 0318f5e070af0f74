"""Two compiled steps in two threads: ranks go on in one order, or all raise; numbers stay right."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import spmd
from tests.harness.cases import MLP
from tests.harness.oracle import all_unequal, snapshot
from tests.harness.pool import Ranks

CASE = MLP(sizes=(15, 7), rows=6, optimizer="SGD")


def evaluate(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def beside_each_other(rank: int, world: int, style: str) -> tuple[int, list[str]]:
    """Training in one thread and evaluation in another, on one batch; how many updates there were, what differs."""
    batch = CASE.part(rank, 0)
    torch.manual_seed(0)
    model, optimizer = CASE.build()
    train = spmd.compile(parallel_mode=spmd.DataParallel(style))(CASE.step)
    evaluation = spmd.compile(parallel_mode=spmd.DataParallel(style))(evaluate)
    train(model, optimizer, *batch), evaluation(model, batch[0])
    done, results = [0, 0], [None, None]

    def repeat(which: int, call: Any) -> None:
        for _ in range(30):
            try:
                results[which] = call()
                done[which] += 1
            except spmd.RankMismatchError as error:
                assert "expected all ranks to run the same program" in str(error)

    threads = [
        threading.Thread(target=repeat, args=(0, lambda: train(model, optimizer, *batch))),
        threading.Thread(target=repeat, args=(1, lambda: evaluation(model, batch[0]))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    result = train(model, optimizer, *batch)
    torch.manual_seed(0)
    plain = CASE.build()
    whole = CASE.whole([CASE.part(other, 0) for other in range(world)])
    for _ in range(done[0] + 2):
        expected = CASE.step(*plain, *whole)
    return done[0], all_unequal([snapshot(expected, plain)], [snapshot(result, (model, optimizer))], rank, world)


@pytest.mark.parametrize("style", ["replicate", "fully_shard"])
def test_two_steps_in_two_threads(ranks: Ranks, style: str) -> None:
    (one, differ), (other, differ_too) = ranks.run(2, beside_each_other, style)
    assert one == other and differ == differ_too == []


def forked(rank: int, world: int) -> tuple[bool, bool]:
    """Whether a forked child keeps the parameters of the fork, and whether any of them is in shared memory."""
    model, optimizer = CASE.build()
    step = spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))(CASE.step)
    for k in range(2):
        step(model, optimizer, *CASE.part(rank, k))
    local = [p.to_local() for p in model.parameters()]
    before = sum(float(p.detach().sum()) for p in local)
    go, answer = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.read(go[0], 1)
        same = before == sum(float(p.detach().sum()) for p in local)
        os.write(answer[1], b"1" if same else b"0")
        os._exit(0)
    for k in range(2, 5):
        step(model, optimizer, *CASE.part(rank, k))
    os.write(go[1], b"x")
    same = os.read(answer[0], 1) == b"1"
    os.waitpid(child, 0)
    return same, any(p.is_shared() for p in local)


def test_a_forked_child_has_parameters_of_its_own(ranks: Ranks) -> None:
    assert ranks.run(2, forked) == [(True, False)] * 2
