"""The memory that is planned for a rank against what two ranks need: a GPT, AdamW, each mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import passes
import spmd
from examples.gpt import GPT, Config
from tests.harness.cases import mlp
from tests.harness.memory import idle_bytes, peak_bytes
from tests.harness.pool import Ranks
from tests.harness.structure import compile_on_fake_ranks

LARGE = Config(width=1536, layers=1, heads=8)  # 29 M parameters: the graphs of a program take 6 MB, whatever its width
SMALL = Config(width=16, layers=1, heads=2, context=16)
DEEP = Config(width=512, layers=2, heads=8, context=256)  # a block for each stage, with more activations than state
STAGES: dict[str, Any] = {"axes": {"stages": "pp"}, "stages": ["blocks.1"], "micro_batches": 4, "schedule": "gpipe"}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def train_cleared_first(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    optimizer.step()
    return loss


def regress(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def regress_cleared_first(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def planned(style: str, world: int, step: Callable[..., Tensor] = regress, **options: object) -> passes.PlannedMemory:
    model = mlp(32, 64, 8).double()
    optimizer = torch.optim.Adam(model.parameters())
    mode = spmd.DataParallel(style)
    compiled = compile_on_fake_ranks(
        world, step, (model, optimizer), torch.ones(6, 32).double(), parallel_mode=mode, **options
    )
    memory: dict[str, passes.PlannedMemory] = compiled.report().memory
    assert memory["cpu"].peak == sum(memory["cpu"].roles.values()) + memory["cpu"].unused
    return memory["cpu"]


STATE = 8 * (32 * 64 + 64 + 64 * 8 + 8)  # bytes of the parameters


def test_all_gradients_are_there_at_the_end_of_backward() -> None:
    for ranks in (1, 2):
        memory = planned("replicate", ranks)
        assert memory.roles["parameters"] == memory.roles["gradients"] == STATE
        assert memory.roles["optimizer state"] == 2 * STATE + 4 * 4  # two averages, and for each parameter a number
        assert memory.roles["other"] == 8 * 6 * 32  # the batch
    # On two ranks in the bucket, by name on one, where no collective says whose they are.
    gradients = [value for value in planned("replicate", 1).largest if value.role == "gradients"]
    assert [(value.name, value.bytes) for value in gradients] == [
        ("model.0.weight", 8 * 2048),
        ("model.2.weight", 4096),
    ]


def test_fully_shard_halves_state_and_packs_gradients() -> None:
    memory = planned("fully_shard", 2)
    assert memory.roles["parameters"] == STATE // 2 and memory.roles["optimizer state"] == STATE + 4 * 4
    assert memory.roles["gradients"] == 2 * STATE and memory.at == "cat"  # by rank, beside each by itself
    assert memory.largest[0].name == "model.0.weight and 3 more" and memory.largest[0].shape == (2, STATE // 16)


def test_without_passes_updates_are_new_values() -> None:
    memory = planned("replicate", 2, passes=())
    assert memory.arena == memory.arena_used == memory.unused == 0
    assert memory.roles["optimizer state"] > 3 * STATE


def peaks(config: Config, rows: int = 1, train: Callable[..., Tensor] = train, **mode: Any) -> tuple[int, int]:
    """The peak of a later call over a rank that is idle, and the planned one, in bytes."""
    idle = idle_bytes()
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    step = spmd.compile(train, parallel_mode=spmd.DataParallel(**mode))
    x = torch.zeros(rows, min(64 * rows, config.context), dtype=torch.int64)
    step(model, optimizer, x)  # compiles, and moves state
    return peak_bytes(lambda: step(model, optimizer, x)) - idle, step.report().memory["cpu"].peak


def measure(rank: int, world: int) -> list[tuple[int, int]]:
    peaks(SMALL)  # imports what compiling imports
    pipeline = {"mesh": init_device_mesh("cpu", (world,), mesh_dim_names=("pp",)), **STAGES}
    found = [peaks(LARGE), peaks(LARGE, parallel_style="fully_shard"), peaks(DEEP, 8, **pipeline)]
    return [*found, peaks(LARGE, train=train_cleared_first)]


def test_gradients_of_the_call_before_count() -> None:
    """They are there until the step writes state, where the new ones are computed in the arena meanwhile."""
    last, first = planned("replicate", 2), planned("replicate", 2, step=regress_cleared_first)
    assert first.roles["gradients"] == last.roles["gradients"] + STATE
    assert first.peak == last.peak + STATE and first.arena == last.arena


@pytest.mark.slow
def test_the_planned_peak_is_within_5_percent_of_the_measured_one(ranks: Ranks) -> None:
    for measured, planned in (pair for rank in ranks.run(2, measure) for pair in rank):
        assert measured == pytest.approx(planned, rel=0.05)
