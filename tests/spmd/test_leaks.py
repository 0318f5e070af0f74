"""What is gone is let go of: programs of dead models with their source and memory, and all of a process group."""

from __future__ import annotations

import gc
import linecache
import os
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import spmd
from passes.runtime.segments import open_segments
from spmd._torch import default_store
from tests.harness.fake import fake_world
from tests.harness.pool import Ranks

pytestmark = pytest.mark.slow


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = F.relu(model(x)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sources() -> int:
    return sum(name.startswith("<spmd program") for name in linecache.cache)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


def figures() -> tuple[int, int, int]:
    """Generated sources, open files, shared segments."""
    gc.collect()
    return sources(), open_files(), len(open_segments())


def sweep(step: spmd.CompiledStep, models: int, x: Tensor) -> list[tuple[int, int, int]]:
    """Train as many models with one step; the figures after each."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(models):
            step(*small(), x)
            found.append(figures())
    return found


@pytest.mark.usefixtures("alone")
def test_a_sweep_of_models_stays_flat_and_warns_of_nothing(pytestconfig: pytest.Config) -> None:
    gc.collect()  # what other tests left
    step, before, models = spmd.compile(train_step), sources(), 50 if pytestconfig.getoption("exhaustive") else 12
    found = sweep(step, models, torch.ones(2, 4, dtype=torch.float64))
    assert found[1:] == [found[1]] * (models - 1)
    assert sources() == before, "a program whose model is gone keeps no source"
    assert len(step.programs) == 1, "the last one can still be looked at"
    assert step.report().seconds


def sweep_on_ranks(rank: int, world: int) -> tuple[list[tuple[int, int, int]], list[int]]:
    """The figures after each model, and the keys in the store after the first models and after all."""
    step, x = spmd.compile(train_step), torch.full((2, 4), rank + 1.0, dtype=torch.float64)
    found, keys = [], []
    for models in (3, 3):
        found += sweep(step, models, x)
        dist.barrier()
        keys.append(default_store().num_keys())
        dist.barrier()
    return found, keys


def test_a_sweep_on_ranks_of_one_host_keeps_no_segments_and_no_keys(ranks: Ranks) -> None:
    for found, (before, after) in ranks.run(2, sweep_on_ranks):
        assert found[2:] == [found[2]] * 4
        assert before == after


@pytest.mark.usefixtures("alone")
def test_the_source_of_a_living_model_stays_until_its_step_goes() -> None:
    gc.collect()  # what other tests left
    before, step, held = sources(), spmd.compile(train_step), small()
    step(*held, torch.ones(2, 4, dtype=torch.float64))
    assert sources() == before + 1
    del step
    gc.collect()
    assert sources() == before


@pytest.mark.usefixtures("alone")
def test_many_programs_of_one_model_still_warn() -> None:
    step, models = spmd.compile(lambda model, x, k: model(x) * int(k)), [nn.Linear(2, 2) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in models * 2:
            step(model, torch.ones(1, 2), "0")
        for k in range(1, 7):
            step(models[-1], torch.ones(1, 2), str(k))
    with pytest.warns(UserWarning, match=r"has compiled 8 programs.*k: '6' -> '7'"):
        step(models[-1], torch.ones(1, 2), "7")


@pytest.fixture
def groups(alone: None) -> Iterator[list[weakref.ref[Any]]]:
    """References to process groups that must be gone in the end."""
    found: list[weakref.ref[Any]] = []
    yield found
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    assert [each() for each in found] == [None] * len(found)


def test_nothing_of_a_process_group_is_kept(groups: list[weakref.ref[Any]]) -> None:
    step = spmd.compile(train_step)
    step(*small(), torch.ones(2, 4, dtype=torch.float64))
    spmd.world()
    groups.append(weakref.ref(dist.group.WORLD))


def test_a_program_does_not_run_in_another_process_group(alone: None) -> None:
    step, held, x = spmd.compile(train_step), small(), torch.ones(2, 4, dtype=torch.float64)
    for size in (1, 4, 2):
        with fake_world(size):
            gone = weakref.ref(dist.group.WORLD)
            for _ in range(2):
                step(*held, x)
            assert step.program is not None and step.program.mesh.size == size
            assert len(step.programs) == 1
    del step
    gc.collect()
    assert gone() is None


def apart_then_together(rank: int, world: int, folder: Path) -> list[float]:
    """Each rank trains by itself, then all train together: from there on they have what rank 0 has."""
    step, held = spmd.compile(train_step), small()
    for rows in range(2, 3 + rank):  # a rank compiles as many programs as it likes
        step(*held, torch.full((rows, 4), rank + 1.0, dtype=torch.float64))
    alone = held[0].weight.detach().clone()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
    expected = alone.clone()
    dist.broadcast(expected, 0)
    assert rank == 0 or not torch.equal(alone, expected)
    for _ in range(2):
        step(*held, torch.zeros(2, 4, dtype=torch.float64))
    return [*held[0].weight.flatten().tolist(), *held[0].bias.tolist()]


def test_ranks_that_trained_apart_start_from_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, apart_then_together, tmp_path, process_group=False)
    assert first == second
