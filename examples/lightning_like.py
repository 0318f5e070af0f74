"""A module that says how it is trained, and a loop that compiles its step, as in Lightning.

    spmd run -n 2 examples/lightning_like.py
    python examples/lightning_like.py

The module has ``training_step``, ``configure_optimizers`` and ``log``; the loop knows nothing else of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd

Batch = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Says whether two numbers have the same sign."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))
        self.logged: dict[str, Tensor] = {}

    def log(self, name: str, value: Tensor) -> None:
        """Keep the value of the last step."""
        self.logged[name] = value

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch. Counts are those of all ranks, as sizes in the step are."""
        x, y = batch
        scores = self.net(x)
        self.log("accuracy", (scores.argmax(1) == y).sum() / len(y))
        return F.cross_entropy(scores, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Loop:
    """Trains a module; ``global_step`` counts the steps."""

    def __init__(self, module: Classifier) -> None:
        self.module, self.optimizer, self.global_step = module, module.configure_optimizers(), 0

    @spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))
    def step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One step, written as for one device. ``batch_idx`` becomes an input of the second program."""
        loss = self.module.training_step(batch, batch_idx)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.global_step += 1
        return loss

    def fit(self, batches: Iterable[Batch]) -> float:
        """Train on the batches of this rank; returns the last loss, which is that of all ranks."""
        losses = [self.step(batch, k) for k, batch in enumerate(batches)]
        return losses[-1].item()


def draw(count: int, rows: int = 64) -> Iterable[Batch]:
    """Batches of this rank."""
    random = torch.Generator().manual_seed(spmd.world().get_rank())
    for _ in range(count):
        x = torch.randn(rows, 2, generator=random)
        yield x, (x.prod(1) > 0).long()


def make() -> Loop:
    """A loop for a new module, equal on all ranks."""
    torch.manual_seed(0)
    return Loop(Classifier())


if __name__ == "__main__":
    loop = make()
    loss = loop.fit(draw(200))
    if spmd.world().get_rank() == 0:
        print(f"after {loop.global_step} steps: loss {loss:.3f}, accuracy {loop.module.logged['accuracy']:.2f}")
