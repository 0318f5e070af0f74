"""A fine-tuning recipe in the manner of torchtune's: one class that sets up, trains, evaluates, saves and resumes.

    spmd run -n 2 examples/finetune.py
    python examples/finetune.py --steps 20

A small GPT with LoRA adapters learns to count on from a prompt. Sentences have unequal lengths, prompts do not count,
and the loss of several micro-batches is the mean over all their words, on all ranks.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gpt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spmd

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """What a recipe is made of; ``mode`` None trains with plain torch, on one device."""

    folder: Path
    mode: spmd.ParallelMode | None = None
    steps: int = 60
    rows: int = 16  # of a micro-batch, on all ranks
    micro_batches: int = 2
    rank: int = 8  # of the adapters
    lr: float = 0.02
    clip: float = 1.0
    dtype: torch.dtype = torch.float32
    model: gpt.Config = field(default_factory=lambda: gpt.Config(32, layers=2, heads=2, context=16, vocabulary=32))


class LoRA(nn.Module):
    """A frozen linear layer and a trained one of low rank beside it."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class Recipe:
    """Trains adapters; ``step`` counts updates, and ``losses`` has the loss of each."""

    def __init__(self, config: Config) -> None:
        self.config, self.step, self.losses = config, 0, list[float]()
        torch.manual_seed(0)
        self.model = with_adapters(gpt.GPT(config.model), config.rank).to(config.dtype)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, config.steps)
        self.train_step, self.evaluate = self._train_step, self._evaluate
        if config.mode is not None:
            self.train_step = spmd.compile(self._train_step, parallel_mode=config.mode)
            self.evaluate = spmd.compile(self._evaluate, parallel_mode=config.mode)

    def _loss(self, batch: Batch, words: Tensor) -> Tensor:
        """The summed loss of the words that count, over ``words``."""
        scores = self.model(batch["words"]).flatten(0, 1)
        return F.cross_entropy(scores, batch["labels"].flatten(), reduction="sum") / words

    def _train_step(self, micro_batches: Sequence[Batch]) -> Tensor:
        """One update, written as for one device."""
        words = torch.stack([count_words(batch) for batch in micro_batches]).sum()
        total = torch.zeros((), dtype=self.config.dtype)
        for batch in micro_batches:
            loss = self._loss(batch, words)
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _evaluate(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self._loss(batch, count_words(batch))

    def train(self, until: int) -> None:
        """Train up to an update, and save."""
        for step, micro_batches in enumerate(batches(self.config), start=1):
            if self.step >= until:
                break
            if step <= self.step:
                continue  # was trained on before the checkpoint
            self.losses.append(self.train_step(micro_batches).item())
            self.scheduler.step()
            self.step = step
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        spmd.save(self.config.folder, step=self.step, keep=1, **state)

    def resume(self) -> None:
        """Go on from the newest checkpoint."""
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.step = spmd.load(self.config.folder, **state) or 0


def count_words(batch: Batch) -> Tensor:
    """The number of words that count."""
    return (batch["labels"] != -100).sum()


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """``model``, frozen, with an adapter beside each linear layer."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, key, LoRA(child, rank))
    return model


def batches(config: Config) -> Iterator[list[Batch]]:
    """This rank's rows of the micro-batches of each update, padded to one length."""
    draw, size = torch.Generator().manual_seed(0), config.model.context
    own = torch.arange(config.rows).tensor_split(spmd.world().size())[spmd.world().get_rank()]
    while True:
        found = []
        for _ in range(config.micro_batches):
            lengths = torch.randint(6, size + 1, (config.rows, 1), generator=draw)
            firsts = torch.randint(config.model.vocabulary, (config.rows, 1), generator=draw)
            words = (torch.arange(size + 1) + firsts) % config.model.vocabulary
            place = torch.arange(1, size + 1)  # of each label; the prompt has 4 words
            labels = torch.where((place >= 4) & (place < lengths), words[:, 1:], -100)
            found.append({"words": words[own, :-1], "labels": labels[own]})
        yield found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "finetune")
    options = parser.parse_args()
    config = Config(options.folder / "checkpoints", spmd.DataParallel("fully_shard"), options.steps)
    if spmd.world().get_rank() == 0:
        shutil.rmtree(options.folder, ignore_errors=True)
    Recipe(config).train(options.steps // 2)
    recipe = Recipe(config)
    recipe.resume()
    recipe.train(options.steps)
    spmd.export(options.folder / "adapters", recipe.model, only="*lora*")
    loss = recipe.evaluate(next(batches(config))[0])
    if spmd.world().get_rank() == 0:
        print(f"after {recipe.step} updates: loss {loss.item():.3f} a word")
