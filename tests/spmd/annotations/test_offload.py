"""Offloading: state lives in host memory; copies between host and device are nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spmd
from tests.harness.oracle import all_unequal, compiled_run, plain_run
from tests.harness.pool import Ranks
from tests.spmd.annotations.test_annotated_numbers import Annotated, Net, make_optimizer

POLICY = spmd.OffloadPolicy()


def per_block(model: Net) -> None:
    for module in (*model.blocks, model):
        spmd.fully_shard(module, offload_policy=POLICY)


def replicated(model: Net) -> None:
    for module in (*model.blocks, model):
        spmd.replicate(module, offload_policy=POLICY)


def siblings(model: Net) -> None:
    """The first block is offloaded, the second is not, and what is left is replicated on the host."""
    spmd.fully_shard(model.blocks[0], offload_policy=spmd.OffloadPolicy(pin_memory=False))
    spmd.fully_shard(model.blocks[1])
    spmd.replicate([model.embed, model.norm, model.head], offload_policy=POLICY)


STRATEGIES: dict[str, Callable[[Net], None]] = {
    "per block": per_block, "replicated": replicated, "siblings": siblings, "mode": lambda model: None,
}  # fmt: skip


@dataclass(frozen=True)
class Offloaded(Annotated):
    """Also clips by the global norm, which mixes what is on the host with what is on the device."""

    def build(self) -> tuple[Any, ...]:
        """The annotated model and its optimizer."""
        model = Net().double()
        STRATEGIES[self.strategy](model)
        return model, make_optimizer(self.optimizer, model.parameters())

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward, clipping, update."""
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss


def differences(rank: int, world: int, case: Offloaded) -> list[str]:
    mode = spmd.DataParallel("fully_shard", offload_policy=POLICY) if case.strategy == "mode" else None
    _, got = compiled_run(rank, case, 5, parallel_mode=mode)
    return all_unequal(plain_run(case, world, 5), got, rank, world)


@pytest.mark.parametrize("strategy, optimizer", [
    ("per block", "SGD"), ("per block", "Adam"), ("replicated", "Adam"), ("siblings", "SGD"), ("siblings", "AdamW"),
    ("mode", "SGD momentum"),
])  # fmt: skip
def test_numbers_are_those_of_the_plain_step(ranks: Ranks, strategy: str, optimizer: str) -> None:
    assert ranks.run(2, differences, Offloaded(strategy, optimizer)) == [[], []]
