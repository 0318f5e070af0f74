"""The GRPO example: with published weights, ranks learn what one device learns that samples from its own model."""

from __future__ import annotations

from pathlib import Path

import grpo
import pytest
import torch
import torch.distributed as dist

from tests.harness.pool import Ranks

STEPS = 20


def learned(off_policy: bool) -> list[float]:
    """The rewards on one device, without ``spmd``."""
    model = grpo.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=grpo.RATE)
    rewards, waiting = list[float](), list[grpo.Texts]()
    for version in range(1, STEPS + 1):
        texts = grpo.sample(model, version)
        rewards.append(texts.reward)
        waiting.append(texts)
        if len(waiting) > off_policy:
            on = waiting.pop(0)
            grpo.train_step(model, optimizer, on.tokens, on.log_probabilities, on.advantages)
    return rewards


def run(rank: int, world: int, to: str, folder: Path, off_policy: bool) -> list[float]:
    """The last process samples, the others train."""
    if rank == world - 1:
        grpo.sampler(to, folder / "sampler", world - 1)
        return []
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world - 1)
    try:
        return grpo.train(rank, world - 1, to, folder / "sampler", STEPS, off_policy)
    finally:
        dist.destroy_process_group()


@pytest.mark.costly("20 rounds of two ranks and a sampler, beside those of one device")
@pytest.mark.parametrize("off_policy", [False, True])
def test_the_reward_grows_as_on_one_device(off_policy: bool, ranks: Ranks, tmp_path: Path, to: str) -> None:
    one, other, _ = ranks.run(3, run, to, tmp_path, off_policy, process_group=False)
    assert one == other == pytest.approx(learned(off_policy), abs=1e-12)
    assert one[-1] > 2 * one[0]
