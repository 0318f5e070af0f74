"""Many calls with random faults: afterwards all ranks have equal bits, or all have raised a sentence."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

import spmd
from spmd.ranks import local_ranks
from tests.harness.cases import MLP
from tests.harness.pool import Ranks

from . import faults
from .faults import Fault, Injected, arm

CASE = MLP(sizes=(15, 17, 4), rows=6, optimizer="AdamW")
ACTIONS = (faults.raises, faults.interrupts, faults.runs_out_of_memory, faults.stops, faults.is_slow)
PROMPT = 10.0  # seconds from a fault until all ranks have raised; on a loaded machine


class Soak:
    """The same random faults on all ranks, each on one of them; ``messages`` is what a rank raised."""

    def __init__(self, rank: int, world: int, style: str, seed: int) -> None:
        self.rank, self.world, self.random = rank, world, random.Random(seed)
        torch.manual_seed(0)
        self.objects = CASE.build()
        self.step = spmd.compile(parallel_mode=spmd.DataParallel(style), passes=faults.pipeline())(CASE.step)
        self.messages: list[str] = []
        self.slowest = 0.0

    def run(self, calls: int, every: int) -> None:
        """Make so many calls, one in ``every`` of which has a fault."""
        k = 0
        while k < calls:
            victim, action, at = self.random.randrange(self.world), self.random.choice(ACTIONS), self.random.random()
            fault = Fault(action, at) if k and k % every == 0 else None
            arm(fault if victim == self.rank else None)
            try:
                self.step(*self.objects, *CASE.part(self.rank, k))
                if fault is not None and action not in (faults.stops, faults.is_slow):
                    self.step(*self.objects, *CASE.part(self.rank, k))  # this rank ended the call, and learns of it now
            except (spmd.SpmdError, Injected, KeyboardInterrupt, MemoryError) as error:
                self.messages.append("\n".join([str(error), *getattr(error, "__notes__", ())]))
                self._recover(fault, time.time())
            finally:
                arm(None)
            k += 1
            if k % every == 0:
                self.saved = tree_map(clone, [each.state_dict() for each in self.objects])
                self._assert_equal()

    def _recover(self, fault: Fault | None, raised: float) -> None:
        times: list[Any] = [None] * self.world
        dist.all_gather_object(times, (fault.when if fault else None, raised))
        happened = [when for when, _ in times if when is not None]
        self.slowest = max(self.slowest, max(when for _, when in times) - max(happened))
        try:
            self.step.recover()
        except spmd.SpmdError:
            for each, state in zip(self.objects, self.saved, strict=True):
                each.load_state_dict(tree_map(clone, state))

    def _assert_equal(self) -> None:
        """All ranks hold the same replicas, or parts after as many updates."""
        texts: list[Any] = [None] * self.world
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.objects[0].parameters()]
        dist.all_gather_object(texts, [each.detach().numpy().tobytes() for each in whole])
        assert all(text == texts[0] for text in texts), "replicas differ"


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def soak(rank: int, world: int, style: str, transport: str, calls: int, every: int) -> tuple[list[str], float, int]:
    with pytest.MonkeyPatch.context() as patched:
        if transport == "messages":
            patched.setattr(local_ranks, "_host", lambda: f"host {rank}")
        run = Soak(rank, world, style, seed=calls)
        run.run(calls, every)
    return run.messages, run.slowest, len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(7200)  # with --exhaustive
@pytest.mark.parametrize("style, transport", [("replicate", "shared memory"), ("fully_shard", "messages")])
def test_random_faults_end_with_equal_ranks_or_a_sentence(
    ranks: Ranks, request: pytest.FixtureRequest, style: str, transport: str
) -> None:
    calls, every = (2_000, 20) if request.config.getoption("--exhaustive") else (24, 4)
    outcomes = ranks.run(2, soak, style, transport, calls, every, timeout=max(120, calls * 3))
    for messages, slowest, files in outcomes:
        assert messages and all("tate is" in each or "state of the ranks" in each for each in messages), messages
        assert slowest < PROMPT
        assert files < 200
