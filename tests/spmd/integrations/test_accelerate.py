"""The loop of accelerate in the examples has the numbers of one device, and its checkpoints are read at any size."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spmd

from ...harness.pool import Ranks
from .launched import launched

pytest.importorskip("accelerate")
pytestmark = pytest.mark.processes

Found = tuple[list[float], dict[str, Tensor]]


def trained(folder: Path, batch: int, first: int, epochs: int) -> Found:
    """The losses of ``epochs``, behind a checkpoint if ``first`` is not 0, and the whole state dict after them."""
    from accelerate_loop import Run

    run = Run(rows=36, batch=batch, dtype=torch.float64)
    if first:
        run.accelerator.load_state(folder)
    losses = [run.epoch(seed) for seed in range(first, first + epochs)]
    if not first:
        run.accelerator.save_state(folder)
    assert len(run.step.programs) <= 3  # without state and with, and one for a cache that accelerate fills
    return losses, run.accelerator.get_state_dict(run.model)


def job(rank: int, world: int, *args: Any) -> Found:
    with launched(rank, world):
        return trained(*args)


MODES: dict[str, spmd.ParallelMode | None] = {
    "accelerate": None,
    "eager": None,
    "replicate": spmd.DataParallel("replicate"),
    "fully_shard": spmd.DataParallel("fully_shard"),
    "zero1": spmd.DataParallel("replicate", shard_optimizer=True),
}


class Loop:
    """A script of accelerate's with two micro-batches an update; the last one of an epoch has one, of three rows."""

    def __init__(self, kind: str) -> None:
        import accelerate

        from spmd.integrations.accelerate import Accelerator

        self.kind, self.found = kind, list[Any]()
        config = accelerate.DataLoaderConfiguration(split_batches=True, even_batches=False)
        made = accelerate.Accelerator if kind == "accelerate" else Accelerator
        self.accelerator = made(gradient_accumulation_steps=2, cpu=True, dataloader_config=config)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
        x = torch.randn(19, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        rows = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=4)
        prepared = self.accelerator.prepare(model, optimizer, scheduler, rows)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.accelerator.even_batches = True  # rows that are repeated are dropped from what is gathered
        self.evaluated = self.accelerator.prepare(DataLoader(rows.dataset, batch_size=4))
        is_compiled = MODES[kind] is not None
        self.train_step = spmd.compile(self.step, parallel_mode=MODES[kind]) if is_compiled else self.step
        self.predict = spmd.compile(self.scores, parallel_mode=MODES[kind]) if is_compiled else self.scores

    def accumulating(self, outside: bool) -> AbstractContextManager[None]:
        """``accumulate``, for one of the kinds around the call of the step."""
        return self.accelerator.accumulate(self.model) if outside == (self.kind == "zero1") else nullcontext()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        accelerator = self.accelerator
        with self.accumulating(outside=False):
            loss = F.mse_loss(self.model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def scores(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(x)  # type: ignore[no-any-return]

    def train(self, folder: Path, first: int) -> None:
        """Train from batch ``first`` of the epoch on, of which the first one ends in the middle of an accumulation."""
        if first:
            self.accelerator.load_state(folder)
        for k, (x, y) in enumerate(self.loader):
            if k < first:
                continue
            with self.accumulating(outside=True):
                loss = self.train_step(x, y)
            self.scheduler.step()
            self.found += [loss.item(), self.accelerator.sync_gradients, *self.scheduler.get_last_lr()]
            if k == 0:
                self.accelerator.save_state(folder)

    def evaluate(self) -> None:
        self.model.eval()
        metrics = [self.accelerator.gather_for_metrics(self.predict(x) - y) for x, y in self.evaluated]
        self.found += torch.cat(metrics).flatten().tolist()
        self.model.train()


def looped(kind: str, folder: Path) -> Found:
    loop = Loop(kind)
    loop.train(folder, 0)
    loop.evaluate()
    loop.train(folder, 1)
    return loop.found, spmd.state_dict(loop.accelerator.unwrap_model(loop.model))


def loop_job(rank: int, world: int, *args: Any) -> Found:
    with launched(rank, world):
        return looped(*args)


def assert_equal(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-11)


def test_a_loop_of_accelerate_trains_and_resumes_as_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    (before,) = ranks.run(1, job, tmp_path / "one", 12, 0, 1)
    (after,) = ranks.run(1, job, tmp_path / "one", 12, 1, 1)
    for found in ranks.run(2, job, tmp_path / "two", 6, 0, 1):
        assert_equal(found, before)
    for found in ranks.run(2, job, tmp_path / "one", 6, 1, 1):  # what one rank wrote
        assert_equal(found, after)


@pytest.mark.parametrize(
    "world, kind",
    [
        (1, "eager"),
        pytest.param(1, "replicate", marks=pytest.mark.exhaustive),
        (2, "fully_shard"),
        pytest.param(2, "zero1", marks=pytest.mark.exhaustive),
    ],
)
def test_a_loop_that_accumulates_is_the_one_of_accelerate_on_one_device(
    world: int, kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    (expected,) = ranks.run(1, loop_job, "accelerate", tmp_path / "plain")
    for found in ranks.run(world, loop_job, kind, tmp_path / kind):
        assert_equal(found, expected)


def refused_job(rank: int, world: int) -> None:
    import accelerate

    from spmd.integrations.accelerate import Accelerator

    with launched(rank, world):
        config = accelerate.DataLoaderConfiguration(even_batches=False)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        model = nn.Linear(3, 1)
        data = TensorDataset(torch.ones(5, 3))
        model, loader = accelerator.prepare(model, DataLoader(data, batch_size=2))
        with pytest.raises(ValueError, match=r"some of 2 ranks get a batch more than others .*\(it has 3 batches\)"):
            next(iter(loader))
        with pytest.raises(ValueError, match="some of 2 ranks get a batch more than others"):
            next(iter(accelerator.skip_first_batches(loader, 1)))
        accelerator.dataloader_config.split_batches = True
        loader = accelerator.prepare(DataLoader(data, batch_size=4))
        with pytest.raises(ValueError, match=r"the last batch has 1 rows.*even_batches=True"):
            next(iter(loader))
        with torch.no_grad():
            assert len(next(iter(loader))[0]) == 2  # to evaluate, each rank may take what it has
        with pytest.raises(spmd.SpmdError, match=r"accelerator.backward ran on 2 ranks .*step = spmd.compile\(step\)"):
            accelerator.backward(model(torch.ones(2, 3)).sum())
        with pytest.raises(ValueError, match="join_uneven_inputs lets ranks go on"), accelerator.join_uneven_inputs([]):
            pass
        with pytest.raises(ValueError, match=r"ranks have \[\[\(1, 3\)\], \[\(2, 3\)\]\]"):
            accelerator.gather_for_metrics(torch.ones(1 + rank, 3))
        assert len(accelerator.gather(torch.ones(2, 3))) == 4


def test_what_would_train_ranks_apart_is_refused(ranks: Ranks) -> None:
    ranks.run(2, refused_job)


@pytest.mark.usefixtures("alone")
def test_a_scheduler_of_accelerate_stays_outside_of_the_step() -> None:
    with launched(0, 1):
        loop = Loop("eager")

        @spmd.compile()
        def step(x: Tensor, y: Tensor) -> None:
            loop.step(x, y)
            loop.scheduler.step()

        step(torch.ones(2, 3).double(), torch.ones(2, 1).double())
        loop.accelerator.step = 1
        with pytest.raises(spmd.CaptureError, match=r"it calls a scheduler \(StepLR\).*Call schedulers outside"):
            step(torch.ones(2, 3).double(), torch.ones(2, 1).double())
