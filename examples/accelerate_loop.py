"""A loop of accelerate, with the step compiled: its data loader, tracker-like prints, and checkpoints.

spmd run -n 2 examples/accelerate_loop.py
python examples/accelerate_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spmd
from spmd.integrations.accelerate import Accelerator


class Net(nn.Sequential):
    """Says whether two numbers have the same sign."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))


class Run:
    """Everything that is trained and saved, and the steps."""

    def __init__(self, rows: int = 512, batch: int = 32, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        x = torch.randn(rows, 2, dtype=dtype)
        data = TensorDataset(x, (x.prod(1) > 0).long())
        order = DataLoaderConfiguration(use_seedable_sampler=True)  # the same on any number of ranks
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
        model, loader = Net().to(dtype), DataLoader(data, batch_size=batch, shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        mode = spmd.DataParallel("fully_shard")
        self.step = spmd.compile(self._step, parallel_mode=mode)
        self.scores = spmd.compile(self._scores, parallel_mode=mode)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step, written as for one device."""
        loss = F.cross_entropy(self.model(x), y)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def epoch(self, number: int) -> float:
        """Train on each row once, in an order of its own; returns the mean loss, that of all ranks."""
        self.loader.set_epoch(number)
        self.model.train()
        losses = []
        for x, y in self.loader:
            losses.append(self.step(x, y))
            self.scheduler.step()
        return torch.stack(losses).mean().item()

    def _scores(self, x: Tensor) -> Tensor:
        """The scores of this rank's rows."""
        with torch.no_grad():
            return self.model(x)  # type: ignore[no-any-return]

    def accuracy(self) -> float:
        """The part of all rows that is right."""
        self.model.eval()
        right = [self.accelerator.gather_for_metrics(self.scores(x).argmax(1) == y) for x, y in self.loader]
        return torch.cat(right).float().mean().item()


if __name__ == "__main__":
    folder = Path(tempfile.gettempdir()) / "accelerate_loop"
    run = Run()
    for number in range(4):
        run.accelerator.print(f"loss {run.epoch(number):.3f}, accuracy {run.accuracy():.2f}")
    run.accelerator.save_state(folder)
    run = Run()
    run.accelerator.load_state(folder)
    run.accelerator.print(f"from the checkpoint: accuracy {run.accuracy():.2f}")
