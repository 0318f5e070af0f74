"""A model of transformers under a trainer class that hands it batches of a tokenizer, as in Hugging Face's Trainer.

    torchrun --standalone --nproc-per-node 2 examples/hugging_face.py
    python examples/hugging_face.py

The model is small and has random weights, and its text is random numbers; nothing is downloaded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import spmd

WORDS, LENGTH = 40, 8  # all batches are padded to one length, so that one program fits all


class Trainer:
    """Trains a model that returns its own loss."""

    def __init__(self, model: nn.Module, max_grad_norm: float = 1.0) -> None:
        self.model, self.max_grad_norm = model, max_grad_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=100)
        self.state: dict[str, Any] = {}

    def compute_loss(self, inputs: BatchEncoding) -> Tensor:
        """The loss of a batch, that of all ranks in a compiled step."""
        outputs = self.model(**inputs)
        self.state["logits"] = outputs.logits.detach()  # of this rank's rows, after each call
        loss: Tensor = outputs.loss
        return loss

    @spmd.compile(parallel_mode=spmd.DataParallel("fully_shard"))
    def training_step(self, inputs: BatchEncoding) -> Tensor:
        """One step, written as for one device."""
        loss = self.compute_loss(inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self, steps: int, rows: int = 16) -> list[float]:
        """The losses of so many steps."""
        random = torch.Generator().manual_seed(spmd.world().get_rank())
        losses = []
        for _ in range(steps):
            losses.append(self.training_step(draw(rows, random)).item())
            self.scheduler.step()
        return losses


def draw(rows: int, random: torch.Generator) -> BatchEncoding:
    """Rows of words; the label says whether the first one is of the first half of all words."""
    words = torch.randint(WORDS, (rows, LENGTH), generator=random)
    mask = torch.ones_like(words)
    return BatchEncoding({"input_ids": words, "attention_mask": mask, "labels": (words[:, 0] < WORDS // 2).long()})


def make() -> Trainer:
    """A trainer for a model of one layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, **sizes)
    config.problem_type = "single_label_classification"  # else the first call notes it, and the second compiles again
    return Trainer(BertForSequenceClassification(config))


if __name__ == "__main__":
    losses = make().train(60)
    if spmd.world().get_rank() == 0:
        print(f"the loss was {losses[0]:.3f} and is {losses[-1]:.3f} after {len(losses)} steps")
