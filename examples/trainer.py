"""A trainer class whose step is a compiled method: model, optimizer and settings are attributes of ``self``.

    spmd run -n 2 examples/trainer.py
    python examples/trainer.py

It fits a small network to a sine. Every rank passes its own rows of the batch; the loss is that of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd


@dataclass
class Settings:
    """Settings that the step reads besides model and optimizer; a change compiles another program."""

    clip: float = 1.0
    smoothing: float = 0.9


class Trainer:
    """Trains ``model``; ``steps`` counts its steps, and ``average`` is the running average of its loss."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings | None = None) -> None:
        self.model, self.optimizer, self.settings = model, optimizer, settings or Settings()
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        self.steps, self.average = 0, torch.zeros(())

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean squared error, over the rows of all ranks."""
        return F.mse_loss(self.model(batch["x"]), batch["y"])

    @spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))
    def train_step(self, batch: dict[str, Tensor]) -> Tensor:
        """One step, written as for one device."""
        loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.average = torch.lerp(loss.detach(), self.average, self.settings.smoothing)
        return loss

    def fit(self, steps: int, rows: int = 32) -> float:
        """Train for ``steps`` on random rows; returns the average of the loss."""
        random = torch.Generator().manual_seed(spmd.world().get_rank())
        for _ in range(steps):
            x = torch.rand(rows, 1, generator=random) * 6 - 3
            self.train_step({"x": x, "y": torch.sin(x)})
            self.scheduler.step()  # outside of the step, which reads the learning rate at each call
        return float(self.average)


def make(width: int = 32) -> Trainer:
    """A trainer for a network with two hidden layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01))


if __name__ == "__main__":
    trainer = make()
    found = trainer.fit(200)
    if spmd.world().get_rank() == 0:
        print(f"after {trainer.steps} steps the mean squared error is {found:.4f}")
        print(f"one program: {[i.name for i in trainer.train_step.program.inputs][:3]}, ...")
