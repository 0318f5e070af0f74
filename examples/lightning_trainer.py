"""Lightning's Trainer with the step compiled: trains, evaluates, saves and resumes.

    spmd run -n 2 examples/lightning_trainer.py
    python examples/lightning_trainer.py --mode replicate

The module is an ordinary LightningModule; what is added is the strategy.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import spmd
from spmd.integrations.lightning import Strategy

Batch = tuple[Tensor, Tensor]


class Classifier(lightning.LightningModule):
    """Says whether two numbers have the same sign."""

    def __init__(self, width: int = 32, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of a batch, over the rows of all ranks, as is the accuracy that it logs."""
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.log("train_loss", loss)
        self.log("train_accuracy", (scores.argmax(1) == y).double().mean(), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Evaluate this rank's rows with the whole model; ``sync_dist`` takes the mean over the rows of all."""
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).double().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW, with a learning rate that falls after each epoch."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def loader(rows: int = 512, seed: int = 0, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    """Pairs of numbers, and whether their signs are equal; Lightning shuffles the rows, and cuts them for the ranks."""
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return DataLoader(TensorDataset(x, (x.prod(1) > 0).long()), batch_size=32)


def make(folder: Path, strategy: Any, **settings: Any) -> lightning.Trainer:
    """A trainer on the ranks that there are."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    return lightning.Trainer(
        accelerator=kind, devices=ranks, strategy=strategy, default_root_dir=folder, **{**quiet, **settings}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="fully_shard", choices=["replicate", "fully_shard"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lightning_trainer")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    compile_options = {"parallel_mode": spmd.DataParallel(options.mode)}
    torch.manual_seed(0)
    first = make(options.folder, Strategy(compile_options=compile_options), max_epochs=2)
    first.fit(Classifier(), loader(), loader(seed=1))
    first.save_checkpoint(options.folder / "two.ckpt")
    model = Classifier()
    second = make(options.folder, Strategy(compile_options=compile_options), max_epochs=8)
    second.fit(model, loader(), loader(seed=1), ckpt_path=options.folder / "two.ckpt")  # the third epoch is next
    (metrics,) = second.validate(model, loader(seed=1), verbose=False)
    if second.is_global_zero:
        print(f"after {second.global_step} steps: accuracy {metrics['accuracy']:.2f} of rows that were not trained on")
